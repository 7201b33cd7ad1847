"""Random fault schedules: what goes wrong in one trial, all of it decided by a seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import get_args

from fault_proxy import ANY, Action, Fault

READS = ("LIST in", "HEAD in", "GET in", "LIST _commits", "GET _commits", "GET _run.json", "LIST data", "GET data")
WRITES = ("PUT _run.json", "PUT data", "PUT _commits", "PUT report.html", "PUT _SUCCESS.json")
BY_WORKERS = ("GET in", "PUT data", "PUT _commits")  # operations whose asker may be killed without ending the session
PER_UNIT = ("PUT data", "PUT _commits")
BY_FILE = ("HEAD in", "GET in", "GET data")  # these come several times in every session
STORAGE_ACTIONS: tuple[Action, ...] = ("throttle", "fail", "reset", "lose", "cut", "slow")
TWISTS = (
    "input replaced",  # at some request: rows of two versions must not meet
    "input replaced, nightly",  # there, the new version takes the old one's place
    "model replaced",  # between two starts
    "clock",  # of each driver, set forth and back all the time
    "clock, nightly",
    "killed, nightly",  # and started again at once, or raced by a second one
    "no conditions",  # the store ignores them at the first start
    "no conditions, nightly",
)
WEIGHTS = (2, 2, 2, 2, 1, 4, 1, 1)
KILLS_APART = (
    150  # a killed nightly driver's successor makes so many requests at most before it is killed too, if it is
)
FAR = (3_600.0, -7_200.0, 86_400.0 * 365, -86_400.0 * 3_650)  # what a clock is wrong by, in seconds
FOREIGN_BESIDE = ("notes.txt", "out.bak/_run.json", "out-2/data/00000-000000000-0123456789ab.parquet", "out_notes")
FOREIGN_WITHIN = (
    "out/notes.txt", "out/data/notes.txt", "out/data/test-00000.parquet", "out/_failed/README.md", "out/README.md",
    "out/report.html.bak", "out/_lease/notes.md", "out/old/_commits/00000-000000000.json", "out/_SUCCESS",
)  # fmt: skip
FILES = 2  # of the input
VICTIMS = ("replica", "node", "server", "driver")


@dataclass(frozen=True)
class Schedule:
    """Of one trial."""

    seed: int
    faults: tuple[Fault, ...]
    victims: tuple[str | None, ...]  # per fault, what its call ends
    units: int
    rows_per_unit: int
    special: dict[int, str]  # rows that spring a trap
    replicas: int
    racing: bool  # a second driver works on the same output
    twist: str | None = None  # what else happens
    foreign: tuple[str, ...] = ()  # files of others, in the output as soon as it is a run's

    @property
    def nightly(self) -> bool:
        return self.twist is not None and "nightly" in self.twist

    @property
    def killed_drivers(self) -> int:
        """As many sessions are processes of their own, or there would be no one to kill."""
        return self.victims.count("driver") if self.nightly else min(1, self.victims.count("driver"))

    def __str__(self) -> str:
        faults = [
            f"{victim or fault.action} at {fault.operation} {fault.nth}"
            + (f" x{fault.times}" if fault.times > 1 else "")
            for fault, victim in zip(self.faults, self.victims, strict=True)
        ]
        extra = (
            [f"row {row} {text.split()[0]}" for row, text in self.special.items()]
            + ["a race"] * self.racing
            + [self.twist] * (self.twist is not None)
        )
        return f"seed {self.seed}: {self.units} units, {self.replicas} replicas; " + ", ".join(faults + extra)


def random_schedule(seed: int, calls: Mapping[str, Callable[[], object]]) -> Schedule:
    """`calls` end the victims of their names."""
    random = Random(seed)
    units, rows = random.randint(3, 8), random.randint(1, 6)
    faults, victims = [], []
    for _ in range(random.randint(1, 5)):
        fault, victim = _storage_fault(random, units), None
        kind = random.random()
        if kind < 0.25:
            operation = random.choice(BY_WORKERS)
            # What reads a file first is the planning, the job's own process.
            nth = random.randint(FILES + 1, FILES + 3) if operation == "GET in" else random.randint(1, units)
            fault = Fault(operation, nth, random.choice(("kill before", "kill after")))
        elif kind < 0.55:
            victim = random.choices(VICTIMS, weights=(4, 2, 2, 3))[0]
            fault = _deadly_fault(random, units, calls[victim])
        faults.append(fault)
        victims.append(victim)
    special = {}
    if random.random() < 0.1:
        special[random.randrange(units * rows)] = random.choice(("KILL the process", "RAISE an error"))
    racing = random.random() < 0.07 and "driver" not in victims
    replicas = 1 if racing else random.choice((1, 1, 2))
    twist = random.choices(TWISTS, WEIGHTS)[0] if random.random() < 0.65 else None
    if twist is not None and "killed" in twist:
        racing = random.random() < 0.3
        kills = _kills(random, calls["driver"])
        faults, victims = [*faults[:1], *kills], [*victims[:1], *["driver"] * len(kills)]
    if twist is not None and "input" in twist:
        special = {}
        # The second one puts the first version back.
        ats = random.sample([(operation, nth) for operation in PER_UNIT for nth in range(1, units + 1)], 2)
        swaps = [Fault(operation, nth, "call before", call=calls["input"]) for operation, nth in ats]
        swaps = swaps[: random.choice((1, 1, 2))]
        faults, victims = [*faults[:2], *swaps], [*victims[:2], *["input"] * len(swaps)]
    foreign = tuple(random.sample(FOREIGN_WITHIN, random.randint(0, 4)))
    return Schedule(seed, tuple(faults), tuple(victims), units, rows, special, replicas, racing, twist, foreign)


def _storage_fault(random: Random, units: int) -> Fault:
    operation = random.choice((*READS, *WRITES, *PER_UNIT, *PER_UNIT))
    actions = [a for a in STORAGE_ACTIONS if a not in ("cut", "slow") or operation.startswith(("GET", "LIST"))]
    nth = random.randint(1, units if operation in PER_UNIT else 3 if operation in BY_FILE else 1)
    return Fault(operation, nth, random.choice(actions), times=random.randint(1, 4))


def _deadly_fault(random: Random, units: int, call: Callable[[], object]) -> Fault:
    """Before or after a write, a commit, or the end: the points of the protocol."""
    action: Action = random.choice(("call before", "call after"))
    operation = random.choice((*PER_UNIT, *PER_UNIT, "PUT _run.json", "PUT report.html", "PUT _SUCCESS.json"))
    return Fault(operation, random.randint(1, units) if operation in PER_UNIT else 1, action, call=call)


def _kills(random: Random, call: Callable[[], object]) -> list[Fault]:
    """One to three, at any request: while the job waits for a dead one's lease too."""
    nth, kills = random.randint(1, 60), []
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        kills.append(Fault(ANY, nth, random.choice(("call before", "call after")), call=call))
        nth += random.randint(1, KILLS_APART)
    return kills


assert set(STORAGE_ACTIONS) < set(get_args(Action))
