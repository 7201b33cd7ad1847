"""A schedule only ever shrinks, survives its file, and says what is wrong with a bad one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import ModelShape, Plateau, Schedule, ScheduleError, Unit, decode_flop_speedup, for_target_speedup
from engine.schedules import decays, orders, recipes
from engine.schedules.decays import Decay
from engine.schedules.orders import Order

Schedules = Callable[[int], st.SearchStrategy[Schedule]]

ORDERS: dict[str, Callable[[int], Order]] = {
    "lowest first": orders.lowest_first,
    "lowest first above two": lambda layers: orders.lowest_first(layers, warmup=2),
    "top first": orders.top_first,
    "evenly spaced": orders.evenly_spaced,
    "lowest first, unit by unit": lambda layers: orders.of_units(orders.lowest_first(layers)),
    "evenly spaced, unit by unit": lambda layers: orders.of_units(orders.evenly_spaced(layers)),
}
RAMPS: dict[str, Callable[[int, int, int], Decay]] = {
    "linear": decays.linear,
    "square root": decays.power_law,
    "square": lambda start, floor, horizon: decays.power_law(start, floor, horizon, exponent=2.0),
    "exponential": decays.exponential,
    "slow exponential": lambda start, floor, horizon: decays.exponential(start, floor, horizon, rate=0.1),
    "cosine": decays.cosine,
}


def layers_of(units: tuple[Unit, ...]) -> list[int]:
    """Layers of which both units are there."""
    return [unit.layer for unit in units if unit.kind == "a" and Unit("m", unit.layer) in units]


def assert_nested(schedule: Schedule, steps: int) -> None:
    for step in range(steps):
        assert set(schedule.active(step + 1)) <= set(schedule.active(step))
        assert {Unit("a", 0), Unit("m", 0)} <= set(schedule.active(step))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ramp", RAMPS)
@settings(max_examples=20)
@given(data=st.data(), layers=st.integers(2, 40), horizon=st.integers(1, 60))
def test_what_is_skipped_once_stays_skipped(
    ramp: str, order: str, data: st.DataObject, layers: int, horizon: int
) -> None:
    groups = ORDERS[order](layers)
    floor = data.draw(st.integers(0, len(groups)))
    start = data.draw(st.integers(0, floor))
    decay = RAMPS[ramp](start, floor, horizon)
    schedule = Schedule.build(layers, groups, decay, horizon)
    assert_nested(schedule, horizon + 3)
    assert (decay(0), decay(horizon), decay(10 * horizon)) == (start, floor, floor)
    for step in range(horizon + 3):
        gone = {unit for group in groups[: decay(step)] for unit in group}
        assert set(schedule.active(step)) == {Unit(kind, n) for kind in "am" for n in range(layers)} - gone


@given(data=st.data(), layers=st.integers(2, 40))
def test_a_step_decay_skips_what_it_lists(data: st.DataObject, layers: int) -> None:
    order = orders.lowest_first(layers)
    skipped = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=6)))
    starts = sorted(data.draw(st.sets(st.integers(1, 50), min_size=len(skipped) - 1, max_size=len(skipped) - 1)))
    counts = list(zip([0, *starts], skipped, strict=True))
    schedule = Schedule.build(layers, order, decays.step(counts), horizon=50)
    assert_nested(schedule, 53)
    for step in range(53):
        assert layers - len(layers_of(schedule.active(step))) == [n for first, n in counts if first <= step][-1]


@given(layers=st.integers(2, 40), data=st.data())
def test_a_constant_decay_skips_the_same_at_every_step(layers: int, data: st.DataObject) -> None:
    floor = data.draw(st.integers(0, layers - 1))
    schedule = Schedule.build(layers, orders.top_first(layers), decays.constant(floor), horizon=0)
    assert schedule.plateaus == (Plateau(0, 2 * floor),)
    assert layers_of(schedule.active(1000)) == list(range(layers - floor))


@given(data=st.data(), layers=st.integers(1, 6))
def test_any_valid_schedule_is_nested(schedules: Schedules, data: st.DataObject, layers: int) -> None:
    assert_nested(data.draw(schedules(layers)), steps=16)


@given(data=st.data(), layers=st.integers(1, 6), model=st.text())
def test_a_schedule_survives_its_file(schedules: Schedules, data: st.DataObject, layers: int, model: str) -> None:
    drawn = data.draw(schedules(layers))
    schedule = Schedule(drawn.layers, drawn.skip_order, drawn.plateaus, {"name": "drawn", "made_for": {"model": model}})
    again = Schedule.from_dict(json.loads(schedule.to_json()))
    assert again == schedule
    assert again.provenance == schedule.provenance


def test_the_file_reads_as_designed() -> None:
    schedule = recipes.skipdecode(layers=4, warmup=1, max_active=4, min_active=2, horizon=4)
    assert json.loads(schedule.to_json()) == {
        "format": 1,
        "layers": 4,
        "skip_order": ["a1", "m1", "a2", "m2", "a3", "m3"],
        "skipped": [[0, 0], [2, 2], [3, 4]],
        "name": "SkipDecode",
    }


def test_a_schedule_is_read_from_a_file_or_its_directory(tmp_path: Path) -> None:
    schedule = recipes.early_termination(layers=6, active=4)
    file = tmp_path / "schedule.json"
    file.write_text(schedule.to_json())
    assert Schedule.read(file) == Schedule.read(str(tmp_path)) == schedule


GOOD: dict[str, Any] = {"format": 1, "layers": 4, "skip_order": ["a2", "m2", "a1"], "skipped": [[0, 0], [8, 2]]}
MALFORMED: dict[str, tuple[object, str]] = {
    "no object": ([1, 2], "list"),
    "no format": ({**GOOD, "format": None}, "format None"),
    "a later format": ({**GOOD, "format": 2}, "format 2"),
    "no layers": ({key: GOOD[key] for key in GOOD if key != "layers"}, "layers .* None"),
    "layers in words": ({**GOOD, "layers": "four"}, "layers .* 'four'"),
    "a fraction of layers": ({**GOOD, "layers": 4.5}, "layers .* 4.5"),
    "layers that are a truth": ({**GOOD, "layers": True}, "layers .* True"),
    "no layer at all": ({**GOOD, "layers": 0}, "layers .* 0"),
    "no skip order": ({**GOOD, "skip_order": None}, "skip_order .* None"),
    "a skip order in one string": ({**GOOD, "skip_order": "a1 a2"}, "skip_order .* 'a1 a2'"),
    "an unknown kind of unit": ({**GOOD, "skip_order": ["a1", "x2"]}, "'x2'"),
    "a unit without layer": ({**GOOD, "skip_order": ["a"]}, "'a'"),
    "a unit below the model": ({**GOOD, "skip_order": ["a-1"]}, "'a-1'"),
    "a unit that is a number": ({**GOOD, "skip_order": [3]}, "3 is not a unit"),
    "a unit above the model": ({**GOOD, "skip_order": ["a2", "m4"]}, "m4"),
    "layer 0": ({**GOOD, "skip_order": ["a2", "m0"]}, "m0"),
    "a unit twice": ({**GOOD, "skip_order": ["a2", "m2", "a2"]}, "twice"),
    "no plateaus": ({**GOOD, "skipped": None}, "skipped .* None"),
    "plateaus in one word": ({**GOOD, "skipped": "none"}, "skipped .* 'none'"),
    "an empty list of plateaus": ({**GOOD, "skipped": []}, "plateau at step 0"),
    "a late first plateau": ({**GOOD, "skipped": [[1, 2]]}, "plateau at step 0"),
    "a plateau of three numbers": ({**GOOD, "skipped": [[0, 1, 2]]}, r"\[\[0, 1, 2\]\]"),
    "a plateau of words": ({**GOOD, "skipped": [[0, "two"]]}, "'two'"),
    "plateaus out of order": ({**GOOD, "skipped": [[0, 0], [8, 1], [4, 2]]}, "first_step=8.*first_step=4"),
    "two plateaus at one step": ({**GOOD, "skipped": [[0, 0], [8, 1], [8, 2]]}, "first_step=8.*first_step=8"),
    "more plateaus than any use": (
        {**GOOD, "skipped": [[step, 0] for step in range(10_001)]}, "10,000 plateaus at most, got 10,001",
    ),
    "a schedule that grows": ({**GOOD, "skipped": [[0, 2], [8, 1]]}, "skips 2 units at step 0 and 1 at step 8"),
    "more skipped than ranked": ({**GOOD, "skipped": [[0, 0], [8, 4]]}, r"order's 3, got \[0, 4\]"),
    "a speed-up in words": ({**GOOD, "decode_flop_speedup": "fast"}, "decode_flop_speedup .* 'fast'"),
    "a target in words": ({**GOOD, "target_speedup": "fast"}, "target_speedup .* 'fast'"),
    "a target that is a truth": ({**GOOD, "target_sample_speedup": True}, "target_sample_speedup .* True"),
    "a speed-up beyond a double": ({**GOOD, "sample_flop_speedup": 10**400}, "sample_flop_speedup must be a finite"),
    "what it was made from as a word": ({**GOOD, "calibrated_on": "texts"}, "calibrated_on .* 'texts'"),
    "what it was trained on as a list": ({**GOOD, "adapted_on": [1]}, r"adapted_on .* \[1\]"),
    "less than nothing skipped": ({**GOOD, "skipped": [[0, -1]]}, r"got \[-1\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_naming_the_bad_value_and_the_file(tmp_path: Path, case: str) -> None:
    data, message = MALFORMED[case]
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule.read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe", b"\x93NUMPY"])
def test_a_file_that_is_not_json_is_refused_naming_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "schedule.json"
    file.write_bytes(content)
    with pytest.raises(ScheduleError, match=r"schedule\.json"):
        Schedule.read(file)


def test_what_is_made_for_no_target_may_say_so() -> None:
    assert Schedule.from_dict({**GOOD, "target_speedup": None}).provenance == {"target_speedup": None}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"nowhere\.json"):
        Schedule.read(tmp_path / "nowhere.json")
    with pytest.raises(ScheduleError, match="cannot be read"):
        Schedule.read("a" * 300)
    with pytest.raises(ScheduleError, match=r"schedule\.json"):
        Schedule.read(tmp_path)


def test_a_schedule_for_another_depth_is_refused_naming_both() -> None:
    with pytest.raises(ScheduleError, match=r"6 layers.*30"):
        Schedule.full_depth(6).check_fits(SMOLLM2)


BAD_DECAYS: dict[str, tuple[Callable[[], object], str]] = {
    "a start above the floor": (lambda: decays.linear(5, 3, 8), "5 to 3"),
    "a negative start": (lambda: decays.cosine(-1, 3, 8), "-1 to 3"),
    "no horizon": (lambda: decays.linear(0, 3, 0), "horizon .* 0"),
    "a flat exponent": (lambda: decays.power_law(0, 3, 8, exponent=0), "exponent .* 0"),
    "a negative rate": (lambda: decays.exponential(0, 3, 8, rate=-2), "rate .* -2"),
    "steps that start late": (lambda: decays.step([(4, 1)]), r"\(4, 1\)"),
    "no steps": (lambda: decays.step([]), r"\[\]"),
    "more layers than the order holds": (
        lambda: Schedule.build(6, orders.lowest_first(6), decays.constant(9), 0),
        "skips 9 at step 0, but the order holds 5",
    ),
    "a ramp that ends after the horizon": (
        lambda: Schedule.build(6, orders.lowest_first(6), decays.linear(0, 3, 16), 8),
        "skips 3 in the end, and 2 at the horizon, 8",
    ),
    "no warm-up": (lambda: orders.lowest_first(6, warmup=0), "got 0"),
    "a warm-up beyond the model": (lambda: orders.lowest_first(6, warmup=7), "6 layers, got 7"),
    "SkipDecode with its numbers mixed up": (lambda: recipes.skipdecode(12, 2, 6, 8, 16), "2, 8, 6, 12"),
    "SkipDecode below its warm-up": (lambda: recipes.skipdecode(12, 6, 10, 4, 16), "6, 4, 10, 12"),
    "more active layers than there are": (lambda: recipes.early_termination(12, 13), "13"),
    "fewer active layers than must run": (lambda: recipes.unified_layer_skipping(12, 1), r"\b1\b"),
}


@pytest.mark.parametrize("case", BAD_DECAYS)
def test_a_bad_number_is_refused_by_name(case: str) -> None:
    build, message = BAD_DECAYS[case]
    with pytest.raises(ScheduleError, match=message):
        build()


def test_skipdecode_runs_the_warm_up_and_the_top_and_skips_a_growing_block_between() -> None:
    schedule = recipes.skipdecode(layers=30, warmup=4, max_active=26, min_active=10, horizon=64)
    assert len(layers_of(schedule.active(0))) == 26
    assert len(layers_of(schedule.active(32))) == 18
    assert len(layers_of(schedule.active(60))) == 11
    assert len(layers_of(schedule.active(64))) == len(layers_of(schedule.active(5000))) == 10
    for step in range(70):
        active = layers_of(schedule.active(step))
        skipped = 30 - len(active)
        assert active == [0, 1, 2, 3, *range(4 + skipped, 30)]
        assert len(schedule.active(step)) == 2 * len(active), "SkipDecode skips whole layers"


@given(data=st.data(), layers=st.integers(1, 48), horizon=st.integers(1, 100))
def test_skipdecode_keeps_its_numbers(data: st.DataObject, layers: int, horizon: int) -> None:
    warmup = data.draw(st.integers(1, layers))
    least = data.draw(st.integers(warmup, layers))
    most = data.draw(st.integers(least, layers))
    schedule = recipes.skipdecode(layers, warmup, most, least, horizon)
    depths = [len(layers_of(schedule.active(step))) for step in range(horizon + 2)]
    assert (depths[0], depths[horizon], depths[horizon + 1]) == (most, least, least)
    assert depths == sorted(depths, reverse=True)
    assert all(abs(depth - (most - (most - least) * t / horizon)) <= 0.5 for t, depth in enumerate(depths[:-1]))
    assert set(range(warmup)) <= set(layers_of(schedule.active(horizon)))


def test_published_schedules_are_points_of_one_space() -> None:
    unified = recipes.unified_layer_skipping(layers=9, active=6)
    assert layers_of(unified.active(0)) == [0, 1, 3, 5, 7, 8]  # 4 is farthest from both ends, then 2 and 6
    assert layers_of(recipes.early_termination(layers=9, active=6).active(99)) == [0, 1, 2, 3, 4, 5]
    power = Schedule.build(9, orders.lowest_first(9, warmup=2), decays.power_law(0, 4, 16), horizon=16)
    assert [9 - len(layers_of(power.active(step))) for step in (0, 1, 4, 9, 16)] == [0, 1, 2, 3, 4]
    assert layers_of(power.active(16)) == [0, 1, 6, 7, 8]


SMOLLM2 = ModelShape(
    family="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    context=8192,
    attention_parameters=576 * 64 * 24,
    mlp_parameters=3 * 576 * 1536,
    head_parameters=49152 * 576,
)
SHAPES = st.builds(
    ModelShape,
    family=st.just("llama"),
    layers=st.integers(2, 40),
    hidden=st.just(64),
    heads=st.integers(1, 8),
    kv_heads=st.just(1),
    head_dim=st.integers(4, 64),
    vocab=st.integers(50, 5000),
    context=st.just(4096),
    attention_parameters=st.integers(1_000, 50_000),
    mlp_parameters=st.integers(1_000, 200_000),
    head_parameters=st.integers(3_000, 300_000),
)
LENGTHS = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 300)), min_size=1, max_size=20).filter(
    lambda lengths: any(generated > 1 for _, generated in lengths)
)


def floor_of(schedule: Schedule, order: Order) -> int:
    """Groups of the order that are skipped in the end."""
    sizes = [sum(map(len, order[:count])) for count in range(len(order) + 1)]
    return sizes.index(schedule.plateaus[-1].skipped)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ramp", ["constant", *RAMPS])
@settings(max_examples=20)
@given(data=st.data(), shape=SHAPES, lengths=LENGTHS, horizon=st.integers(1, 100), target=st.floats(1.0, 3.0))
def test_a_target_is_met_with_the_lowest_floor_or_refused_as_out_of_reach(
    ramp: str,
    name: str,
    data: st.DataObject,
    shape: ModelShape,
    lengths: list[tuple[int, int]],
    horizon: int,
    target: float,
) -> None:
    order = ORDERS[name](shape.layers)
    start = 0 if ramp == "constant" else data.draw(st.integers(0, len(order)))

    def decay(floor: int) -> Decay:
        return decays.constant(floor) if ramp == "constant" else RAMPS[ramp](start, floor, horizon)

    def reached(floor: int) -> float:
        return decode_flop_speedup(shape, Schedule.build(shape.layers, order, decay(floor), horizon), lengths)

    if reached(len(order)) < target:
        with pytest.raises(ScheduleError, match=f"{target:g}x cannot be met.*at most {reached(len(order)):.2f}x"):
            for_target_speedup(target, lengths, shape, order, decay, horizon)
        return
    schedule = for_target_speedup(target, lengths, shape, order, decay, horizon)
    assert decode_flop_speedup(shape, schedule, lengths) >= target
    floor = floor_of(schedule, order)
    assert floor == start or reached(floor - 1) < target


def test_a_target_of_one_skips_nothing() -> None:
    assert for_target_speedup(1.0, [(100, 50)], SMOLLM2).is_full_depth


def test_the_default_order_of_a_target_spares_four_warm_up_layers() -> None:
    schedule = for_target_speedup(1.5, [(100, 50), (400, 3)], SMOLLM2)
    active = layers_of(schedule.active(0))
    assert active == [0, 1, 2, 3, *range(34 - len(active), 30)]


def test_a_target_out_of_reach_says_what_is_in_reach() -> None:
    with pytest.raises(ScheduleError, match=r"9x cannot be met.* 4 layers that always run allow at most 3\.\d\dx"):
        for_target_speedup(9.0, [(100, 50)], SMOLLM2)


def test_lengths_decide_whether_a_ramp_meets_its_target() -> None:
    """A ramp solved for long outputs saves less on outputs that end early; solved for the real ones it delivers."""

    def solve(lengths: list[tuple[int, int]]) -> Schedule:
        return for_target_speedup(1.25, lengths, SMOLLM2, None, lambda floor: decays.linear(0, floor, 64), 64)

    short = [(100, 24)] * 4
    assert decode_flop_speedup(SMOLLM2, solve([(100, 128)] * 4), short) < 1.25
    assert decode_flop_speedup(SMOLLM2, solve([(100, 48)] * 4), [(100, 48)] * 4) >= 1.25


@pytest.mark.parametrize("target", [0.9, -1.0, float("nan")])
def test_a_target_below_one_is_refused_by_name(target: float) -> None:
    with pytest.raises(ScheduleError, match=f"got {target}"):
        for_target_speedup(target, [(10, 10)], SMOLLM2)


@pytest.mark.parametrize("lengths", [[], [(10, 1), (20, 1)], [(10, 0)]])
def test_a_target_without_decode_passes_is_refused(lengths: list[tuple[int, int]]) -> None:
    with pytest.raises(ScheduleError, match="decode passes"):
        for_target_speedup(1.5, lengths, SMOLLM2)
