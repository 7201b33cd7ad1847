"""The board counts each row of a unit once, however often the unit is begun and however late its answers are."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.monitoring import board as board_module
from pipeline.monitoring.board import Board, _BoardActor


def test_rows_of_an_attempt_that_was_lost_are_not_counted_with_those_of_the_next() -> None:
    board = _BoardActor()
    for _ in range(2):
        assert board.take("unit", "process 1", "node")
        board.batch_done("unit", 250, 1000)
    counts = board.read([])
    assert (counts.rows, counts.tokens) == (250, 1000)


def test_rows_of_a_unit_that_was_committed_while_the_board_did_not_answer_count_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, answers = _BoardActor(), True
    actor.ready()
    for unit in ("first", "second"):
        actor.batch_done(unit, 250, 1000)

    def get(asked: Any, timeout: float) -> Any:
        if not answers:
            raise TimeoutError
        return actor.read(asked)

    def in_this_process(**_: Any) -> Any:
        return lambda _: SimpleNamespace(
            remote=lambda: SimpleNamespace(read=SimpleNamespace(remote=lambda units: units))
        )

    monkeypatch.setattr(board_module.ray, "remote", in_this_process)
    monkeypatch.setattr(board_module.ray, "get", get)
    monkeypatch.setattr(board_module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    board = Board()
    assert (board.read([]).replicas, board.read([]).rows) == (1, 500)
    answers = False
    late = board.read(["first"])
    assert (late.replicas, late.rows, late.running) == (1, 0, {})
    answers = True
    assert board.read([]).rows == 250
