"""A training's state in one safetensors file: parameters, optimiser, the best so far, learning curve."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.adaptation.curve import Point
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import Trainable
from engine.errors import ScheduleError
from engine.forward.teacher_forcing import Answer
from engine.json_text import check_is_file, parse_json
from engine.parts.part import digest_of
from engine.schedules.schedule import Schedule
from engine.schedules.schedule_file import PROMPTS

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


@dataclass(slots=True)
class TrainingState:
    """How far a training is."""

    best: dict[str, Tensor]  # parameters that did best on held-out answers
    best_kl: float = inf
    step: int = 0  # steps taken
    waiting: int = 0  # judgements since the best
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)


def training_identity(
    recipe: Recipe, schedules: Sequence[Schedule], train: Sequence[Answer], held_out: Sequence[Answer]
) -> str:
    """Of a training: all that decides what comes of it."""
    answers = [[[list(answer.prompt), list(answer.tokens)] for answer in each] for each in (train, held_out)]
    started = [replace(schedule, provenance={}).to_dict() for schedule in schedules]
    for schedule in started:  # a prompt bridge that is fitted anew differs in last bits on another machine
        schedule.get(PROMPTS, {}).pop("digest", None)
        schedule.get(PROMPTS, {}).get("skips", {}).pop("digest", None)
    # Where prompts are bridged, judgements count first tokens, which those of an earlier version did not.
    judged = ["first tokens"] if any(schedule.prompt_bridge for schedule in schedules) else []
    return hashlib.sha256(json.dumps([asdict(recipe), started, answers, *judged]).encode()).hexdigest()


def write_state(
    path: Path,
    state: TrainingState,
    identity: str,
    trainable: Trainable,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Replace the file at once: a process that dies meanwhile leaves the one before. `settings` are what decides the
    identity, by the names that users give it, for `check_settings`.
    """
    tensors = {f"best.{name}": value for name, value in state.best.items()}
    tensors |= {f"now.{name}": value for name, value in trainable.parameters.items()}
    for name, parameter in trainable.parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[parameter][moment] for moment in MOMENTS}
    facts = {
        "of": identity,
        "settings": dict(settings or {}),
        **{name: getattr(state, name) for name in ("best_kl", "step", "waiting", "seconds", "curve")},
    }
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    said = json.dumps(facts)
    unfinished = path.with_name(f".{path.name}.part")
    # By Python, of which a full disk is an OSError.
    unfinished.write_bytes(save(stored, {"state": said, "digest": digest_of(said, sorted(stored.items()))}))
    os.replace(unfinished, path)


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises ScheduleError if there is a checkpoint, and it is damaged or of a training with other settings."""
    if not path.exists():
        return
    kept = _read(path)[0]["settings"]
    # One of another version may know others.
    differ = [name for name, value in settings.items() if name in kept and kept[name] != value]
    if differ:
        changes = "; ".join(f"{name} was {kept[name]!r}, is {settings[name]!r}" for name in differ)
        raise ScheduleError(
            f"the checkpoint {str(path)!r} is of another training ({changes}): go on as it was, delete it to start "
            "anew, or write elsewhere, where what it has brought can be the --schedule to begin with"
        )


def read_state(path: Path, identity: str, trainable: Trainable, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Put parameters and optimiser where they were.

    Raises ScheduleError if the file is damaged or of another training.
    """
    facts, tensors = _read(path)
    if facts["of"] != identity:
        raise ScheduleError(
            f"the checkpoint {str(path)!r} is of another training (other schedule, answers or recipe): "
            "delete it to start anew, or write elsewhere"
        )
    # An earlier version's point before any step has the held-out KL for a loss.
    curve = [Point(step, loss if step else None, *judged) for step, loss, *judged in facts["curve"]]
    best = _named(tensors, "best")
    state = TrainingState(best, facts["best_kl"], facts["step"], facts["waiting"], facts["seconds"], curve)
    trainable.restore(_named(tensors, "now"))
    for name, parameter in trainable.parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(state.step)), **moments}
    return state


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors, as they were written. Raises ScheduleError."""
    try:
        check_is_file(path)
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        said = metadata.get("state", "")
        if metadata.get("digest") != digest_of(said, sorted(tensors.items())):
            raise ValueError("its digest is not that of what it holds")
        return parse_json(said), tensors
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ScheduleError(f"the checkpoint {str(path)!r} cannot be read ({error}): delete it to start anew") from None


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
