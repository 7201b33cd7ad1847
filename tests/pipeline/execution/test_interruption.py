"""Signals end a job in its own time, and a second one at once."""

import os
import signal

import pytest

from pipeline.execution.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered_and_the_second_does_what_it_always_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        os.kill(os.getpid(), number)
        assert interruption.signal == number.name
        assert signal.getsignal(number) == before
