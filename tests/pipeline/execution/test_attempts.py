"""However a unit comes back undone, something is done about it a bounded number of times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.execution.attempts import SUSPECT_DEATHS, SUSPECT_LOSSES, Attempts, Next
from pipeline.execution.wire import Failure

MISHAPS = ("failed", "died", "lost")


def after(attempts: Attempts, mishap: str, kind: str = "unit", limit: int = 3) -> Next:
    if mishap == "failed":
        attempts.failed(Failure("generate", kind, "why"))  # type: ignore[arg-type]
    elif mishap == "died":
        attempts.died("process 1")
    else:
        attempts.lost()
    return attempts.next(limit)


@given(mishaps=st.lists(st.sampled_from(MISHAPS), min_size=12), limit=st.integers(1, 5))
def test_no_series_of_mishaps_goes_on_for_ever(mishaps: list[str], limit: int) -> None:
    attempts = Attempts()
    verdicts = [after(attempts, mishap, limit=limit) for mishap in mishaps]
    assert verdicts[-1] is not Next.AGAIN
    assert verdicts.count(Next.AGAIN) <= limit + SUSPECT_DEATHS + SUSPECT_LOSSES


@pytest.mark.parametrize(
    ("mishap", "times", "verdict"),
    [("failed", 3, Next.GIVE_UP), ("died", SUSPECT_DEATHS, Next.ISOLATE), ("lost", SUSPECT_LOSSES, Next.ISOLATE)],
)
def test_each_mishap_has_its_limit_and_its_consequence(mishap: str, times: int, verdict: Next) -> None:
    attempts = Attempts()
    assert [after(attempts, mishap) for _ in range(times)] == [Next.AGAIN] * (times - 1) + [verdict]
    assert attempts.count == times


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert after(Attempts(), "failed", "refused") is Next.GIVE_UP
