"""An engine double that does what rows tell it to: raise, die, break its device."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_double import ByteTokenizer, Echo, EchoBackend

from engine import ModelError
from pipeline.config import GenerationConfig

KILL, RAISE, BREAK_ONCE = b"KILL", b"RAISE", b"BREAK"


@dataclass(frozen=True)
class Trap(Echo):
    """Looks at its prompts before it generates."""

    scratch: str = ""  # where it remembers what it did once
    armed: bool = True

    def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
        for prompt in prompts if self.armed else ():
            assert not isinstance(prompt, str)
            self._spring(bytes(prompt))

    def _spring(self, text: bytes) -> None:
        if KILL in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISE in text:
            raise ValueError(f"cannot generate for {text.decode()!r}")
        if BREAK_ONCE in text and not (done := Path(self.scratch, "broke")).exists():
            done.touch()
            raise RuntimeError("CUDA error: device-side assert triggered")


class TrapTokenizer(ByteTokenizer):
    """Kills who tokenises what it is told to kill at: a reader, long before any engine."""

    def encode(self, text: str) -> list[int]:
        if "POISON" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)

    encode_plain = encode


@dataclass(frozen=True)
class Company(Echo):
    """Begins nothing before `replicas` processes have something to begin: on a busy machine one may come much later."""

    folder: str = ""  # where they meet
    replicas: int = 2

    def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
        Path(self.folder, str(os.getpid())).touch()
        while len(os.listdir(self.folder)) < self.replicas:
            time.sleep(0.1)


def trap_backend(scratch: Path | str, armed: bool = True) -> EchoBackend:
    return TrapBackend(Trap(scratch=str(scratch), armed=armed))


@dataclass(frozen=True)
class TrapBackend(EchoBackend):
    """Dies while it loads, or cannot, if told to."""

    dies_loading: bool = False
    refuses: str = ""  # what it says

    def tokenizer(self, config: GenerationConfig) -> ByteTokenizer:
        return TrapTokenizer()

    def engine(self, config: GenerationConfig, threads: int | None) -> Echo:
        if self.dies_loading:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refuses:
            raise ModelError(self.refuses)
        return super().engine(config, threads)
