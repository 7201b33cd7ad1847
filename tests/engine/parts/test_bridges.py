"""A bridge is an affine, low-rank or gated map, priced exactly, and refused where it cannot be right."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine import Block, Bridge, HeadPreview, ModelShape, Plateau, Schedule, ScheduleError, Unit
from engine.forward.compiled_parts import compile_bridge
from engine.forward.operations import unit_plans
from engine.kernels import Kernels, kernels_for
from engine.schedules import orders, recipes

WIDTH, RANK, GATES = 24, 5, 7
CPU = torch.device("cpu")
BLOCK = Block.of_layers(1, 3)


def random_tensors(*roles: str, width: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    shapes = {
        "weight": (width, width),
        "bias": (width,),
        "down": (width, RANK),
        "up": (RANK, width),
        "gate": (width, GATES),
        "gate_up": (width, GATES),
        "gate_down": (GATES, width),
    }
    draw = torch.Generator().manual_seed(seed)
    return {role: torch.randn(shapes[role], generator=draw) * width**-0.5 for role in roles}


FORMS = {
    "affine": ("weight", "bias"),
    "low rank": ("down", "up", "bias"),
    "affine, gated": ("weight", "bias", "gate", "gate_up", "gate_down"),
    "low rank, gated": ("down", "up", "bias", "gate", "gate_up", "gate_down"),
}
PARAMETERS = {
    "affine": WIDTH * WIDTH,
    "low rank": 2 * WIDTH * RANK,
    "affine, gated": WIDTH * WIDTH + 3 * WIDTH * GATES,
    "low rank, gated": 2 * WIDTH * RANK + 3 * WIDTH * GATES,
}


def formula(x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """The docstring of Bridge, one token at a time, in float64."""
    t = {role: tensor.double() for role, tensor in tensors.items()}
    rows = []
    for row in x.double():
        linear = row @ t["weight"] if "weight" in t else (row @ t["down"]) @ t["up"]
        out = row + linear + t["bias"]
        if "gate" in t:
            n = row / (row.square().mean() + 1e-6).sqrt()
            gate = n @ t["gate"]
            out = out + (gate * torch.sigmoid(gate) * (n @ t["gate_up"])) @ t["gate_down"]
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("kernels", [Kernels(), kernels_for(CPU, torch.float32)], ids=["plain", "fastest"])
@pytest.mark.parametrize("form", FORMS)
def test_a_bridge_computes_its_formula_on_every_kernel(form: str, kernels: Kernels) -> None:
    tensors = random_tensors(*FORMS[form])
    bridge = Bridge(BLOCK, tensors)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1)) * 30
    torch.testing.assert_close(
        compile_bridge(bridge, kernels, torch.float32, CPU)(x).double(), formula(x, tensors), rtol=1e-4, atol=1e-4
    )
    assert bridge.form == form


@pytest.mark.parametrize("form", FORMS)
def test_its_parameters_are_what_torch_counts(form: str) -> None:
    bridge = Bridge(BLOCK, random_tensors(*FORMS[form]))
    apply = compile_bridge(bridge, Kernels(), torch.float32, CPU)
    with FlopCounterMode(display=False) as counter:
        apply(torch.zeros(3, WIDTH))
    assert bridge.parameters == PARAMETERS[form]
    assert counter.get_total_flops() == 3 * 2 * bridge.parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_may_be_stored_in_half_precision(dtype: torch.dtype) -> None:
    tensors = {role: tensor.to(dtype) for role, tensor in random_tensors("weight", "bias").items()}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    out = compile_bridge(Bridge(BLOCK, tensors), Kernels(), torch.float32, CPU)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), formula(x, tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (random_tensors("weight"), "needs bias"),
        (random_tensors("bias"), "needs bias, weight or down and up"),
        (random_tensors("weight", "down", "up", "bias"), "weight or down and up"),
        (random_tensors("weight", "bias", "gate"), "may have gate, gate_up, gate_down"),
        (random_tensors("weight", "bias") | {"extra": torch.zeros(1)}, "extra"),
        (random_tensors("weight", "bias") | {"bias": torch.zeros(WIDTH + 1)}, "do not fit together"),
        (random_tensors("down", "up", "bias") | {"up": torch.zeros(RANK + 1, WIDTH)}, "do not fit together"),
        (random_tensors("weight", "bias") | {"weight": torch.zeros(WIDTH)}, "do not fit together"),
        (random_tensors("weight", "bias") | {"weight": torch.tensor(1.0)}, "do not fit together"),
        (random_tensors("weight", "bias") | {"bias": torch.tensor(1.0)}, "do not fit together"),
        (random_tensors(*FORMS["affine, gated"]) | {"gate": torch.tensor(1.0)}, "do not fit together"),
        (random_tensors("weight", "bias") | {"bias": torch.zeros(WIDTH).to(torch.float8_e4m3fn)}, "of 16 bits or more"),
        (random_tensors("weight", "bias") | {"bias": torch.full((WIDTH,), torch.nan)}, "no finite number"),
        (random_tensors("weight", "bias") | {"bias": torch.zeros(WIDTH, dtype=torch.int8)}, "no finite number"),
    ],
)
def test_tensors_that_make_no_bridge(tensors: dict[str, Tensor], said: str) -> None:
    with pytest.raises(ScheduleError, match=said) as refused:
        Bridge(BLOCK, tensors)
    assert "a1..m2" in str(refused.value)


def test_bridges_are_equal_when_their_tensors_are() -> None:
    tensors = random_tensors("weight", "bias")
    same = Bridge(BLOCK, {role: tensor.clone() for role, tensor in tensors.items()})
    assert Bridge(BLOCK, tensors) == same
    assert hash(Bridge(BLOCK, tensors)) == hash(same)
    assert Bridge(Block.of_layers(1, 4), tensors) != same
    tensors["bias"] = torch.nextafter(tensors["bias"], torch.tensor(torch.inf))
    assert Bridge(BLOCK, tensors) != same


def bridged(**changes: Any) -> Schedule:
    """Four layers; steps 0 and 1 replace layer 1, later ones layers 1 and 2."""
    bridges = {
        "short": Bridge(Block.of_layers(1, 2), random_tensors("weight", "bias")),
        "long": Bridge(BLOCK, random_tensors("down", "up", "bias", seed=1)),
    }
    order = tuple(unit for group in orders.lowest_first(4) for unit in group)
    plateaus = (Plateau(0, 2, ("short",)), Plateau(2, 4, ("long",)))
    return Schedule(**{"layers": 4, "skip_order": order, "plateaus": plateaus, "bridges": bridges, **changes})


@pytest.mark.parametrize(
    ("plateaus", "said"),
    [
        ((Plateau(0, 2, ("long",)),), "at step 0 a2, m2 still runs"),
        ((Plateau(0, 0, ("short",)),), "a1, m1 still runs"),
        ((Plateau(0, 2), Plateau(3, 4, ("long", "short"))), "two bridges replace a1 at step 3"),
        ((Plateau(0, 2, ("other",)),), "bridge 'other', but the schedule's bridges are: short, long"),
    ],
)
def test_a_bridge_replaces_only_what_is_skipped_and_only_once(plateaus: tuple[Plateau, ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        bridged(plateaus=plateaus)


def with_correction(before: str) -> Schedule:
    """As `bridged`, with a correction before a unit at every step."""
    name = f"before {before}"
    correction = Bridge(Block.before(Unit.parse(before)), random_tensors("weight", "bias", seed=5))
    plateaus = (Plateau(0, 2, ("short", name)), Plateau(2, 4, ("long", name)))
    return bridged(plateaus=plateaus, bridges={**bridged().bridges, name: correction})


def test_a_correction_stands_before_a_unit_that_runs_at_all_its_steps() -> None:
    schedule = with_correction("m3")
    assert [[str(bridge.block) for bridge in schedule.bridges_on(plateau)] for plateau in (0, 1)] == [
        ["a1..m1", "before m3"],
        ["a1..m2", "before m3"],
    ]
    steps = [
        step
        for run, plateaus, before in unit_plans(schedule)
        for step, happens in (("bridge", before[1] is not None), (str(run.unit), plateaus > 1))
        if happens
    ]
    assert steps == ["a0", "m0", "bridge", "a3", "bridge", "m3"]
    for unit, step in (("a1", 0), ("a2", 2), ("a4", 0)):
        with pytest.raises(ScheduleError, match=f"stands before {unit}, which does not run at step {step}"):
            with_correction(unit)


def test_a_schedule_that_corrects_and_skips_nothing_is_not_full_depth() -> None:
    correction = Bridge(Block.before(Unit.parse("m3")), random_tensors("weight", "bias", seed=5))
    layers = bridged().layers
    assert not Schedule(layers, (), (Plateau(0, 0, ("c",)),), bridges={"c": correction}).is_full_depth
    assert Schedule(layers).is_full_depth


def test_a_unit_has_one_correction() -> None:
    twice = {name: Bridge(Block.before(Unit("a", 3)), random_tensors("weight", "bias")) for name in ("one", "two")}
    with pytest.raises(ScheduleError, match="two bridges stand before a3 at step 0"):
        bridged(plateaus=(Plateau(0, 0, ("one", "two")),), bridges=twice)


def test_a_correction_survives_its_file(tmp_path: Path) -> None:
    schedule = with_correction("a3")
    schedule.write(tmp_path)
    assert Schedule.read(tmp_path) == schedule
    written = json.loads((tmp_path / "schedule.json").read_text())
    assert written["bridges"]["before a3"]["before"] == "a3"
    assert schedule.first_place == 2
    assert Schedule.full_depth(4).first_place == 8
    assert recipes.early_termination(5, active=3).first_place == 6  # its order names layers that it never skips


def test_a_block_is_one_unit_or_more() -> None:
    backwards = Bridge(Block(Unit("m", 2), Unit("a", 1)), random_tensors("weight", "bias"))
    with pytest.raises(ScheduleError, match="no unit"):
        bridged(plateaus=(Plateau(0, 4, ("b",)),), bridges={"b": backwards})


def test_a_bridge_of_another_width_does_not_fit_the_model(make_shape: Callable[..., ModelShape]) -> None:
    bridged().check_fits(make_shape(layers=4, hidden=WIDTH))
    with pytest.raises(ScheduleError, match=f"'short' maps hidden states of width {WIDTH}, but .* width 32"):
        bridged().check_fits(make_shape(layers=4, hidden=32))


@pytest.fixture
def make_shape() -> Callable[..., ModelShape]:
    def make(layers: int, hidden: int) -> ModelShape:
        return ModelShape("llama", layers, hidden, 2, 1, 8, 50, 100, 100, 100, 100)

    return make


def test_a_schedule_and_its_bridges_survive_their_files(tmp_path: Path) -> None:
    schedule = bridged(provenance={"name": "made for this test"})
    schedule.write(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "schedule.json"):
        read = Schedule.read(path)
        assert read == schedule
        assert read.to_dict() == schedule.to_dict()
        assert read.provenance == schedule.provenance
        assert [bridge.form for bridge in read.bridges_on(1)] == ["low rank"]


@pytest.mark.parametrize("name", ["head", "prompts", "prompts skip"])
def test_a_bridge_called_like_a_part_that_is_not_there_survives_too(name: str, tmp_path: Path) -> None:
    bridge = bridged().bridges["short"]
    schedule = bridged(plateaus=(Plateau(0, 2, (name,)),), bridges={name: bridge})
    schedule.write(tmp_path)
    assert Schedule.read(tmp_path) == schedule
    if name == "head":
        preview = HeadPreview(2, {"down": torch.ones(WIDTH, 3), "up": torch.ones(3, WIDTH), "bias": torch.ones(50)})
        with pytest.raises(ScheduleError, match="no bridge may be called 'head'"):
            replace(schedule, head_preview=preview)


def test_the_schedule_file_names_what_each_bridge_replaces(tmp_path: Path) -> None:
    schedule = bridged()
    schedule.write(tmp_path)
    written = json.loads((tmp_path / "schedule.json").read_text())
    assert written["skipped"] == [[0, 2], [2, 4]]
    assert written["bridged"] == [["short"], ["long"]]
    assert written["bridges"]["long"]["replaces"] == ["a1", "m2"]
    assert set(load_file(tmp_path / "bridges.safetensors")) == {
        *("short.weight", "short.bias"),
        *("long.down", "long.up", "long.bias"),
    }


def test_the_object_changes_when_a_bridge_does() -> None:
    """Runs are named by it: other bridges must make another run."""
    other = {**bridged().bridges, "long": Bridge(BLOCK, random_tensors("down", "up", "bias", seed=2))}
    assert bridged(bridges=other).to_dict() != bridged().to_dict()
    assert bridged(bridges=other) != bridged()


def test_what_is_wrong_with_a_schedule_of_bridges_is_said(tmp_path: Path) -> None:
    bridged().write(tmp_path)
    good = json.loads((tmp_path / "schedule.json").read_text())
    tensors = load_file(tmp_path / "bridges.safetensors")

    def refusal(changes: dict[str, object]) -> str:
        (tmp_path / "schedule.json").write_text(json.dumps({**good, **changes}))
        with pytest.raises(ScheduleError) as refused:
            Schedule.read(tmp_path)
        assert str(tmp_path / "schedule.json") in str(refused.value)
        return str(refused.value)

    assert "bridged must list" in refusal({"bridged": [["short"]]})
    assert "bridged must list" in refusal({"bridged": [["short"], [7]]})
    assert "bridged must list" in refusal({"bridged": None})
    assert "tensors of 'long', which schedule.json does not name" in refusal(
        {"bridges": {"short": good["bridges"]["short"]}, "bridged": [["short"], ["short"]]}
    )
    assert "bridges must map names" in refusal({"bridges": ["short"]})
    assert "which units it replaces" in refusal({"bridges": {"short": {"replaces": ["a1"]}}})
    assert "no tensors for bridge 'new'" in refusal({"bridges": {"new": good["bridges"]["long"]}})
    assert "not those the schedule was made with" in refusal(
        {"bridges": {**good["bridges"], "short": {**good["bridges"]["short"], "replaces": ["a1", "m2"]}}}
    )
    (tmp_path / "schedule.json").write_text(json.dumps({key: good[key] for key in good if key != "bridged"}))
    with pytest.raises(ScheduleError, match="bridged must list"):
        Schedule.read(tmp_path)
    save_file({**tensors, "short.bias": tensors["short.bias"] + 1}, tmp_path / "bridges.safetensors")
    assert "tensors of bridge 'short' are not those" in refusal({})
    (tmp_path / "bridges.safetensors").write_bytes(b"no tensors")
    assert "bridges.safetensors' cannot be read" in refusal({})
    (tmp_path / "bridges.safetensors").unlink()
    assert "belong beside its schedule.json" in refusal({})
    with pytest.raises(ScheduleError, match="no tensors for bridge 'short'"):
        Schedule.from_dict(good)
