"""Figures of the report as SVG texts, drawn by matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from engine.adaptation.curve import Point
from engine.bootstrap import Estimate
from pipeline.evaluation.contender import FULL_DEPTH
from pipeline.evaluation.figures import Figures
from pipeline.reporting.page import ACCENT, INK, PALE, head, in_legend, panels, to_svg

# Rivals: hues that stay apart for most colour-blind readers (Okabe and Ito's palette, without its green).
RIVAL_COLORS = (
    "#0072b2", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f", "#b8860b", "#5e4fa2", "#8c564b", "#17becf", "#e377c2",
    "#333333",
)  # fmt: skip
OWN_COLORS = (ACCENT, "#66a61e", "#86c5a4", "#1b4d3e")
MARKERS = "sD^vP*Xh<>pd"
_HEAT = mpl.colors.LinearSegmentedColormap.from_list("quality", ["#8fc7a8", "#ffffff", "#f4d9c6"])
_OWN = {"linewidth": 2.2, "markersize": 7, "zorder": 3}
_RIVAL = {"linewidth": 1.1, "markersize": 5, "zorder": 2}
LEGEND_CHARACTERS = 140  # that fit side by side below a figure
KEY_CHARACTERS = 9  # as wide as what stands before and behind a name there
MOST_EXCESS = 2.0  # nats a token that are drawn: beyond them texts are broken, one as another

Styles = dict[str, dict[str, Any]]  # keywords of a line, by method


def line_styles(found: Sequence[Figures]) -> Styles:
    """Of every method, the same in all figures."""
    own, rivals, markers = cycle(OWN_COLORS), cycle(RIVAL_COLORS), cycle(MARKERS)
    styles: Styles = {FULL_DEPTH: {"color": INK, "marker": "o", **_OWN}}
    for each in found:
        if each.name not in styles:
            color, line = (next(rivals), _RIVAL) if each.is_rival else (next(own), _OWN)
            styles[each.name] = {"color": color, "marker": next(markers), **line}
    return styles


def frontier(found: Sequence[Figures], styles: Styles, whole_sample: bool) -> str:
    """Quality against FLOP speed-up, with intervals: excess NLL, and share of full depth's ROUGE-L."""
    figure, (left, right) = panels(2, 4.7)
    judged = "to references" if any(each.share_of_full_depth["rouge_l"] for each in found) else "to full depth's output"
    drawn: list[tuple[Axes, str, Callable[[Figures], Estimate | None]]] = [
        (left, "excess NLL under full depth, nats a token", lambda each: each.excess_nll),
        (right, f"ROUGE-L {judged}, share of full depth", _rouge_share),
    ]
    speeds = [each.sample_flop_speedup if whole_sample else each.decode_flop_speedup for each in found]
    placed = [(each, speed) for each, speed in zip(found, speeds, strict=True) if speed is not None]
    for axes, title, of in drawn:
        head(axes, title)
        for name in dict.fromkeys(each.name for each in found):
            points = [(speed, quality) for each, speed in placed if each.name == name and (quality := of(each))]
            _line(axes, name, sorted(points), styles)
        axes.set_xlabel(f"{'whole-sample' if whole_sample else 'decode'} FLOP speed-up")
        axes.set_xlim(left=min([1.0, *(speed.value for _, speed in placed)]) - 0.02)
    left.axhline(0, color=PALE, linewidth=1, zorder=1)
    left.set_ylim(top=min(left.get_ylim()[1], MOST_EXCESS))
    for each, speed in placed:
        if each.excess_nll is not None and each.excess_nll.value > MOST_EXCESS:
            style = styles[each.name] | {"marker": 6, "linestyle": ""}  # a triangle that stands for what is above
            left.plot(speed.value, MOST_EXCESS, clip_on=False, **style)
    right.axhline(1, color=PALE, linewidth=1, zorder=1)
    right.set_ylim(-0.03, max(1.12, right.get_ylim()[1]))
    _legend(figure, [left])
    return to_svg(figure)


def savings(maps: Mapping[str, Sequence[tuple[int | None, float, Figures]]]) -> str:
    """Heat maps, one per method, of cells: layers that prompts run (None: all), decode target, figures."""
    figure, found = panels(len(maps), 3.4, columns=1)
    for axes, (name, cells) in zip(found, maps.items(), strict=False):
        targets = sorted({target for _, target, _ in cells})
        rows: list[int | None] = [None, *sorted({count for count, *_ in cells if count is not None}, reverse=True)]
        grid = np.full((len(rows), len(targets)), np.nan)
        head(axes, f"{name}: excess NLL in nats a token, and FLOP speed-up of the whole sample")
        for prompt_layers, target, figures in cells:
            excess, speed = figures.excess_nll, figures.sample_flop_speedup
            if excess is None:
                continue
            row, column = rows.index(prompt_layers), targets.index(target)
            grid[row, column] = excess.value
            shown = f"{excess.value:.2f}" + (f"\n{speed.value:.2f}x" if speed else "")
            axes.text(column, row, shown, ha="center", va="center", fontsize=9, color=INK)
        axes.imshow(grid, aspect="auto", cmap=_HEAT, vmin=0.0, vmax=0.5)
        axes.set_xticks(range(len(targets)), ["full depth" if target == 1 else f"{target:g}x" for target in targets])
        axes.set_yticks(range(len(rows)), ["all" if count is None else str(count) for count in rows])
        axes.set_xlabel("decode FLOP speed-up asked for")
        axes.set_ylabel("layers that prompts run")
    return to_svg(figure)


def agreement_by_step(found: Sequence[Figures], styles: Styles) -> str:
    """One panel per target: where in the answer the likeliest token is still full depth's."""
    scored = [each for each in found if each.agreement_by_step and each.name != FULL_DEPTH]
    targets = sorted({each.target for each in scored}, key=lambda target: target or 0)
    figure, all_axes = panels(len(targets), 3.0)
    for axes, target in zip(all_axes, targets, strict=False):
        head(axes, f"made for {target:g}x" if target else "made for whole samples, or no target")
        for each in scored:
            if each.target == target:
                # Few of many answers are that long: the tail would be noise.
                least = min(10, each.agreement_by_step[0][2] / 2)
                shown = {step: share for step, share, tokens in each.agreement_by_step if tokens >= least}
                style = styles[each.name] | {"marker": ""}
                axes.plot(list(shown), list(shown.values()), label=in_legend(each.name), **style)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("decode step")
    all_axes[0].set_ylabel("agreement")
    _legend(figure, all_axes)
    return to_svg(figure)


def learning_curve(points: Sequence[Point]) -> str:
    """Training loss and held-out KL divergence by step, and the agreement beside them."""
    figure, (left, right) = panels(2, 2.8)
    steps = [point.step for point in points]
    losses = {point.step: point.loss for point in points if point.loss is not None}
    left.plot([*losses], [*losses.values()], color=PALE, label="training loss")
    left.plot(steps, [point.kl for point in points], color=ACCENT, label="held-out KL divergence")
    right.plot(steps, [point.agreement for point in points], color=ACCENT)
    for axes, title in ((left, "nats per token"), (right, "held-out agreement with full depth")):
        head(axes, title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=9)
    return to_svg(figure)


def _legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    """Of all their lines, each once, in as many columns as the longest name leaves room for."""
    labelled = {label: line for axes in all_axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    longest = max(map(len, labelled), default=0)
    columns = max(1, min(4, LEGEND_CHARACTERS // (longest + KEY_CHARACTERS)))
    further = -(-len(labelled) // columns) - 3  # rows beyond those that the panels have room for
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, further))
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def _rouge_share(each: Figures) -> Estimate:
    return each.share_of_full_depth["rouge_l"] or each.against_full_depth["rouge_l"]


def _line(axes: Axes, name: str, points: Sequence[tuple[Estimate, Estimate]], styles: Styles) -> None:
    x = [speed.value for speed, _ in points]
    y = [quality.value for _, quality in points]
    above = [quality.high - quality.value for _, quality in points]
    below = [quality.value - quality.low for _, quality in points]
    # A percentile interval may, by rounding, leave out a value that has no spread at all.
    error = np.clip([below, above], 0, None) if points else None
    axes.errorbar(x, y, error, label=in_legend(name), capsize=2, elinewidth=0.9, **styles[name])
