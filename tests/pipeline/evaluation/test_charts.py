"""Figures of the report: nothing is cut off, and nothing left out without a word."""

from collections.abc import Sequence

import pytest
from matplotlib.figure import Figure

from engine.adaptation.curve import Point
from engine.bootstrap import Estimate
from pipeline.evaluation import charts
from pipeline.evaluation.figures import Figures

LONG = "bridged, adapted, {}.5x of whole samples, 18 layers on prompts"
SHARE = Estimate(0.9, 0.8, 1.0)


def judged(name: str, by_step: Sequence[tuple[int, float, int]], target: float | None = None) -> Figures:
    return Figures(
        label=name, name=name, target=target, prompt_layers=None, is_rival=False, note="", rows=9,
        sample_flop_speedup=SHARE, decode_flop_speedup=SHARE, measured_speedup=None, mean_active_layers=None,
        kl=None, nll=None, excess_nll=SHARE, agreement=SHARE, against_reference={},
        share_of_full_depth={"rouge_l": SHARE}, against_full_depth={"rouge_l": SHARE}, exact_match=SHARE,
        length_ratio=None, repetition=SHARE, unsupported=SHARE, early_stops=SHARE, agreement_by_step=[*by_step],
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Each figure, in place of its SVG."""
    figures: list[Figure] = []
    monkeypatch.setattr(charts, "to_svg", lambda figure: figures.append(figure) or "")
    return figures


@pytest.mark.parametrize(
    ("name", "columns"),
    [("SkipDecode, bridged, {}.25x", 4), ("early termination, bridged, {}", 3), (LONG, 2), (f"{LONG} too", 1)],
)
def test_a_legend_is_no_wider_than_its_figure_and_leaves_the_picture_its_room(
    drawn: list[Figure], name: str, columns: int
) -> None:
    found = [judged(name.format(chr(97 + index)), [(0, 0.9, 9)], 1.5) for index in range(12)]
    styles = charts.line_styles(found)
    charts.frontier(found, styles, whole_sample=True)
    charts.agreement_by_step(found, styles)
    for figure in drawn:
        figure.draw_without_rendering()
        [legend] = figure.legends
        assert legend._ncols == columns
        assert legend.get_window_extent().width <= figure.bbox.width
        assert figure.axes[0].get_window_extent().height > 100


@pytest.mark.parametrize(("tokens", "shown"), [((30, 12, 10, 9), [0, 1, 2]), ((4, 3, 2, 1), [0, 1, 2]), ((1,), [0])])
def test_agreement_is_shown_of_few_answers_too_and_without_the_noise_of_a_tail(
    drawn: list[Figure], tokens: Sequence[int], shown: list[int]
) -> None:
    found = [judged("schedule", [(step, 0.9, count) for step, count in enumerate(tokens)])]
    charts.agreement_by_step(found, charts.line_styles(found))
    [axes] = drawn[0].axes
    assert axes.lines[0].get_xdata().tolist() == shown
    assert axes.get_title(loc="left") == "made for whole samples, or no target"


def test_a_title_does_not_reach_into_the_panel_beside_it(drawn: list[Figure]) -> None:
    found = [judged("schedule", [(0, 0.9, 9)], target) for target in (None, 1.25, 1.5)]
    charts.agreement_by_step(found, charts.line_styles(found))
    drawn[0].draw_without_rendering()
    assert drawn[0].axes[0]._left_title.get_window_extent().x1 < drawn[0].axes[1].bbox.x0


def test_a_learning_curve_has_no_training_loss_before_any_step(drawn: list[Figure]) -> None:
    points = [Point(step, 0.5 if step else None, 0.4, 0.8, 1.0) for step in (0, 20, 40)]
    charts.learning_curve(points)
    assert [line.get_xdata().tolist() for line in drawn[0].axes[0].lines] == [[20, 40], [0, 20, 40]]


def test_names_may_have_dollar_signs_and_begin_with_an_underscore() -> None:
    names = ["budget_$5_vs_$10", "_mine"]
    found = [judged(name, [(0, 0.9, 9)], 1.5) for name in names]
    styles = charts.line_styles(found)
    for svg in (charts.frontier(found, styles, whole_sample=True), charts.agreement_by_step(found, styles)):
        # Its texts stand in comments beside their outlines.
        assert all(name in svg for name in names)
