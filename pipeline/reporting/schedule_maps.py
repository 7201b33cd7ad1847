"""Pictures of schedules: which units run at which step."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from engine import Schedule
from pipeline.reporting.page import ACCENT, COLUMNS, INK, PALE, panels, to_svg

BRIDGE = "#d9a441"
TITLE_CHARACTERS = 40  # that fit above one of them


def schedule_maps(named: Sequence[tuple[str, Schedule]], longest: int) -> str:
    """Steps x units of every schedule, `longest` steps at most: dark where a unit runs, amber where a bridge stands in,
    else white. Where one of them bridges prompts, a column before the first step shows what all prompt tokens run.

    Corrections are amber lines between units.
    """
    figure, found = panels(len(named), 2.6)
    prompts = any(schedule.prompt_bridge for _, schedule in named)
    for axes, (label, schedule) in zip(found, named, strict=False):
        steps = min(longest, max(8, schedule.plateaus[-1].first_step * 4 // 3 + 1))
        _draw(axes, schedule, steps)
        axes.locator_params(axis="x", integer=True)
        if prompts:
            _draw_prompts(axes, schedule, steps)
        lines = textwrap.wrap(label, TITLE_CHARACTERS)
        if schedule.head_preview:
            lines.append(f"head of rank {schedule.head_preview.rank}")
        axes.set_title("\n".join(lines), loc="left", fontsize=9, color=INK)
        axes.tick_params(labelsize=8)
    for axes in found[::COLUMNS]:
        axes.set_ylabel("layer", fontsize=9)
    for axes in found[: len(named)][-COLUMNS:]:
        axes.set_xlabel("decode step", fontsize=9)
    legend = [Patch(facecolor=ACCENT, label="runs"), Patch(facecolor=BRIDGE, label="bridge"),
              Patch(facecolor="#ffffff", edgecolor=PALE, label="skipped")]  # fmt: skip
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return to_svg(figure)


def _draw(axes: Axes, schedule: Schedule, steps: int) -> None:
    grid = np.zeros((2 * schedule.layers, steps))
    corrections = []
    firsts = [min(plateau.first_step, steps) for plateau in schedule.plateaus]
    for index, (first, end) in enumerate(pairwise([*firsts, steps])):
        grid[[unit.place for unit in schedule.active_units(index)], first:end] = 2
        for bridge in schedule.bridges_on(index):
            grid[[unit.place for unit in bridge.block.units], first:end] = 1
            if bridge.corrects:
                corrections.append((bridge.block.first.place / 2, first, end))
    _image(axes, grid, (0, steps))
    for height, first, end in corrections:
        axes.hlines(height, first, end, colors=BRIDGE, linewidth=1.5)


def _draw_prompts(axes: Axes, schedule: Schedule, steps: int) -> None:
    """Left of the first step, as wide as an eighth of all steps."""
    column, bridge = np.full((2 * schedule.layers, 1), 2), schedule.prompt_bridge
    if bridge is not None:
        column[[unit.place for unit in bridge.skipped_units]] = 1
        column[2 * bridge.first :] = 1
    left, right = -0.16 * steps, -0.04 * steps
    _image(axes, column, (left, right))
    axes.text((left + right) / 2, schedule.layers / 2, "prompts", rotation=90, ha="center", va="center", fontsize=8,
              color="#ffffff")  # fmt: skip
    axes.set_xlim(0, steps)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= steps])
    axes.set_xlim(left, steps)


def _image(axes: Axes, grid: np.ndarray, across: tuple[float, float]) -> None:
    axes.imshow(
        grid, origin="lower", aspect="auto", cmap=mpl.colors.ListedColormap(["#ffffff", BRIDGE, ACCENT]),
        vmin=0, vmax=2, interpolation="none", extent=(*across, 0, len(grid) / 2),
    )  # fmt: skip
