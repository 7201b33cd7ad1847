"""A training's state in one safetensors file: parameters, optimiser, the best so far, learning curve."""

from __future__ import annotations

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
from safetensors.torch import save_file
from torch import Tensor

from engine.adaptation.curve import Point
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import Trainable
from engine.errors import ScheduleError
from engine.forward.teacher_forcing import Answer
from engine.json_text import check_is_file, parse_json
from engine.schedules.schedule import Schedule

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
    return hashlib.sha256(json.dumps([asdict(recipe), started, answers]).encode()).hexdigest()


def write_state(
    path: Path,
    state: TrainingState,
    identity: str,
    trainable: Trainable,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Replace the file at once: a process that dies meanwhile leaves the one before.

    Args:
        settings: what decides the identity, by the names that users give it, for `check_settings`.
    """
    tensors = {f"best.{name}": value for name, value in state.best.items()}
    tensors |= {f"now.{name}": value.detach() for name, value in trainable.parameters.items()}
    for name, parameter in trainable.parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[parameter][moment] for moment in MOMENTS}
    facts = {
        "of": identity,
        "settings": dict(settings or {}),
        **{name: getattr(state, name) for name in ("best_kl", "step", "waiting", "seconds", "curve")},
    }
    unfinished = path.with_name(f".{path.name}.part")
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, unfinished, {"state": json.dumps(facts)}
    )
    os.replace(unfinished, path)


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises ScheduleError if there is a checkpoint, and it is damaged or of a training with other settings."""
    if not path.exists():
        return
    try:
        check_is_file(path)
        with safe_open(path, "pt") as file:
            kept = _facts(file.metadata()).get("settings", {})
        if not isinstance(kept, dict):
            raise ValueError("its settings are no object")
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from None
    # One of another version may know others.
    differ = [name for name, value in settings.items() if name in kept and kept[name] != value]
    if differ:
        changes = "; ".join(f"{name} was {kept[name]!r}, is {settings[name]!r}" for name in differ)
        raise ScheduleError(
            f"the checkpoint {str(path)!r} is of another training ({changes}): go on as it was, delete it to start "
            "anew, or write elsewhere"
        )


def read_state(path: Path, identity: str, trainable: Trainable, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Put parameters and optimiser where they were.

    Raises ScheduleError if the file is damaged or of another training.
    """
    try:
        check_is_file(path)
        with safe_open(path, "pt") as file:
            facts = _facts(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        state = None
        if facts.get("of") == identity:
            _check_tensors(tensors, trainable)
            state = _state(facts, _named(tensors, "best"))
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from None
    if state is None:
        raise ScheduleError(
            f"the checkpoint {str(path)!r} is of another training (other schedule, answers or recipe): "
            "delete it to start anew, or write elsewhere"
        )
    trainable.restore(_named(tensors, "now"))
    for name, parameter in trainable.parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(state.step)), **moments}
    return state


def _facts(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What a checkpoint holds beside tensors. Raises ValueError."""
    facts = parse_json((metadata or {}).get("state", ""))
    if not isinstance(facts, dict):
        raise ValueError("its state is no object")
    return facts


def _unreadable(path: Path, error: Exception) -> ScheduleError:
    return ScheduleError(f"the checkpoint {str(path)!r} cannot be read ({error}): delete it to start anew")


def _check_tensors(tensors: dict[str, Tensor], trainable: Trainable) -> None:
    """Raises ValueError unless they are those that `write_state` makes of these parameters."""
    for name, parameter in trainable.parameters.items():
        for prefix in ("best", "now", *MOMENTS):
            tensor = tensors.get(f"{prefix}.{name}")
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise ValueError(f"{prefix}.{name} is not there, or of another shape or type")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{prefix}.{name} holds something that is no finite number")


def _state(facts: dict[str, Any], best: dict[str, Tensor]) -> TrainingState:
    """Raises ValueError."""
    try:
        if not isinstance(facts["curve"], list):
            raise TypeError
        curve = [Point(*point) for point in facts["curve"]]
        state = TrainingState(best, facts["best_kl"], facts["step"], facts["waiting"], facts["seconds"], curve)
    except (KeyError, TypeError):
        raise ValueError("its state is damaged") from None
    counts = [state.step, state.waiting, *(point.step for point in curve)]
    numbers = [state.best_kl, state.seconds, *(value for point in curve for value in point)]
    if not all(type(count) is int and 0 <= count < 2**53 for count in counts) or not all(map(_is_number, numbers)):
        raise ValueError("its state is damaged")
    return state


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
