"""Several trainings of one schedule become one, and nothing else does."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import Engine, Plateau, Schedule, ScheduleError
from engine.adaptation.average import average
from engine.calibration.prompts import fit_prompt_bridge, prompt_cut
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from engine.parts.adapter import Adapter
from tests.engine.adaptation.training import bridged
from tests.engine.prompts import random_prompts
from tests.engine.quiet import quiet


def moved(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.02 * torch.randn(tensor.shape, generator=draw) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def trained(engine: Engine) -> list[Schedule]:
    """As two trainings of one schedule leave it, with all that can be trained."""
    start, shape = bridged(engine.shape, 1, 3), engine.shape
    prompts = fit_prompt_bridge(engine, random_prompts([20] * 8), prompt_cut(shape, shape.layers - 3, [start]), quiet)
    assert prompts.skips is not None
    made = []
    for seed in (1, 2):
        adapter = {"a3.q.down": torch.zeros(shape.hidden, 2), "a3.q.up": torch.zeros(2, shape.heads * shape.head_dim)}
        skips = replace(prompts.skips, tensors=moved(prompts.skips.tensors, seed))
        made.append(
            replace(
                start,
                bridges={
                    name: replace(each, tensors=moved(each.tensors, seed)) for name, each in start.bridges.items()
                },
                prompt_bridge=replace(prompts, tensors=moved(prompts.tensors, seed), skips=skips),
                adapter=Adapter(moved(adapter, seed), changes_prompts=True),
                provenance={"name": f"of seed {seed}"},
            )
        )
    return made


def test_it_is_the_mean_of_what_they_changed(trained: list[Schedule]) -> None:
    one, other = trained
    mean = average(trained)
    assert mean.provenance == one.provenance
    assert mean.prompt_bridge is not None
    for role, tensor in mean.prompt_bridge.tensors.items():
        ours, theirs = (each.prompt_bridge.tensors[role] for each in trained if each.prompt_bridge)
        torch.testing.assert_close(tensor, (ours + theirs) / 2)
    bridges = [each.bridges["bridge"].tensors["weight"] for each in (one, other, mean)]
    torch.testing.assert_close(bridges[2], (bridges[0] + bridges[1]) / 2)
    changes = []
    for each in (one, other, mean):
        assert each.adapter is not None
        (change,) = (change for of_unit in each.adapter.changes.values() for change in of_unit.values())
        changes.append(change.down @ change.up)
    torch.testing.assert_close(changes[2], (changes[0] + changes[1]) / 2)
    assert mean.adapter is not None
    assert mean.adapter.rank == 4


def test_of_one_training_twice_it_is_that_one(engine: Engine, answers: list[Answer], trained: list[Schedule]) -> None:
    judge = Judge(engine.teacher_forced(answers[:12]))
    with torch.inference_mode():
        found = [judge.judge(each, engine.compiled(each)).kl for each in (trained[0], average([trained[0]] * 2))]
    assert found[0].max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": None}, "its adapter$"),
        ({"prompt_bridge": None}, "its bridges, prompt bridge$"),
        ({"plateaus": (Plateau(0, 4, ("bridge",)), Plateau(3, 4, ("bridge",)))}, "its layers$"),
    ],
)
def test_other_schedules_are_refused_by_what_differs(
    trained: list[Schedule], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ScheduleError, match=f"schedule 3 is of another kind than the first, by {said}"):
        average([*trained, replace(trained[0], **changes)])  # type: ignore[arg-type]


def test_an_adapter_of_another_size_is_refused(trained: list[Schedule]) -> None:
    adapter = trained[0].adapter
    assert adapter is not None
    longer = {name: torch.cat([each] * 2, 0 if name.endswith(".down") else 1) for name, each in adapter.tensors.items()}
    with pytest.raises(ScheduleError, match=r"schedule 2 is of another kind than the first, by its adapter$"):
        average([trained[0], replace(trained[0], adapter=replace(adapter, tensors=longer))])


def test_bridges_that_are_no_affine_maps_have_no_mean(trained: list[Schedule]) -> None:
    (name, bridge), *_ = trained[0].bridges.items()
    gate = dict.fromkeys(("gate", "gate_up"), torch.zeros(bridge.hidden, 2)) | {
        "gate_down": torch.zeros(2, bridge.hidden)
    }
    gated = replace(trained[0], bridges={name: replace(bridge, tensors={**bridge.tensors, **gate})})
    with pytest.raises(
        ScheduleError, match=r"the bridge over .* is affine, gated: of affine ones alone is there a mean"
    ):
        average([gated, gated])
