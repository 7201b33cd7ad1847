"""report.html of a study."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine import Schedule
from engine.bootstrap import Estimate
from pipeline.evaluation import charts
from pipeline.evaluation.contender import FULL_DEPTH, Contender
from pipeline.evaluation.figures import Figures, Outputs, worst
from pipeline.reporting import page
from pipeline.reporting.schedule_maps import schedule_maps

Judged = Sequence[tuple[Contender, Figures]]


def render(outputs: Sequence[Outputs], found: Sequence[Figures], config: Mapping[str, Any]) -> str:
    """The report as HTML, of contenders' outputs and their figures; the first are full depth's."""
    styles = charts.line_styles(found)
    judged = [(each.contender, figures) for each, figures in zip(outputs, found, strict=True)]
    schedules = [(one.label, one.method) for one, _ in judged[1:] if isinstance(one.method, Schedule)]
    savings = savings_maps(judged)
    drawn = {
        **({"Savings in prompts and in decoding": charts.savings(savings)} if savings else {}),
        "Quality against compute, prompts included": charts.frontier(found, styles, whole_sample=True),
        "Quality against compute, decoding alone": charts.frontier(found, styles, whole_sample=False),
        "Agreement along the answer": charts.agreement_by_step(found, styles),
        "Schedules": schedule_maps(schedules, config["max_new_tokens"]),
    }
    content = {
        "full": found[0],
        # By target, best first: what a reader compares stands together.
        "contenders": sorted(found[1:], key=lambda each: (each.target or 0, _loss(each))),
        "headline": headline(found),
        "charts": drawn,
        "worst": [(each.contender.label, worst(each)) for each in outputs[1:]],
        "config": config,
        "has_references": any(each.share_of_full_depth["rouge_l"] for each in found),
    }
    return page.render(
        "pipeline.evaluation", content, estimate=_estimate, bare=_bare, percent=_percent, measured=_measured
    )


def savings_maps(judged: Judged) -> dict[str, list[tuple[int | None, float, Figures]]]:
    """By method, where its prompts are cut short too: layers that prompts run, decode target, figures.

    Decoding at full depth is every method's target 1.
    """
    found: dict[str, list[tuple[int | None, float, Figures]]] = {}
    for one, figures in judged:
        if not one.is_rival and (one.target or one.name == FULL_DEPTH):
            found.setdefault(one.name, []).append((one.prompt_layers, one.target or 1.0, figures))
    undiminished = found.pop(FULL_DEPTH, [])
    several = {name: cells for name, cells in found.items() if len({layers for layers, *_ in cells}) > 1}
    return {name: [*undiminished, *cells] for name, cells in several.items()}


def headline(found: Sequence[Figures]) -> str:
    """The best of the schedules under judgement at each target with as many layers on prompts, and those without a
    target in decoding, in five figures, the whole-sample speed-up first.
    """
    own = [each for each in found[1:] if not each.is_rival] or found[1:]
    alike: dict[tuple[float, int | None] | str, list[Figures]] = {}
    for each in sorted(own, key=lambda each: each.target or 0):
        alike.setdefault((each.target, each.prompt_layers) if each.target else each.label, []).append(each)
    lines = []
    for several in alike.values():
        best = min(several, key=_loss)
        rouge = best.share_of_full_depth["rouge_l"]
        share = f"{_bare(rouge)} of" if rouge else f"{_bare(best.against_full_depth['rouge_l'])} to"
        lines.append(
            f"{best.label}: {_bare(best.sample_flop_speedup)}x fewer FLOPs for whole samples, "
            f"{_bare(best.decode_flop_speedup)}x in decoding; excess NLL {_bare(best.excess_nll)} nats a token; "
            f"ROUGE-L {share} full depth's; "
            f"repetition {_percent(best.repetition)}, full depth {_percent(found[0].repetition)}."
        )
    return "\n".join(lines)


def _loss(each: Figures) -> float:
    """What ranks contenders of one target: excess NLL."""
    return each.excess_nll.value if each.excess_nll else math.inf


def _estimate(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.value:.3f}\n{value.low:.3f} {value.high:.3f}"


def _bare(value: Estimate | float | None) -> str:
    if isinstance(value, Estimate):
        value = value.value
    return "-" if value is None else f"{value:.2f}"


def _percent(value: Estimate) -> str:
    return f"{value.value:.1%}"


def _measured(answer: Mapping[str, Any], has_references: bool) -> str:
    """What is said under an answer."""
    facts = [f"NLL {answer['nll']:.2f}"]
    if has_references and answer["rouge_l"] is not None:
        facts.append(f"ROUGE-L {answer['rouge_l']:.2f}")
    if answer["repetition"]:
        facts.append(f"repetition {answer['repetition']:.0%}")
    if answer["unsupported"]:
        facts.append(f"unsupported: {', '.join(answer['unsupported'])}")
    return "; ".join(facts)
