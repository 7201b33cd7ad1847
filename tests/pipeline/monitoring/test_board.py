"""The board counts each row of a unit once, however often the unit is begun."""

from pipeline.monitoring.board import _BoardActor


def test_rows_of_an_attempt_that_was_lost_are_not_counted_with_those_of_the_next() -> None:
    board = _BoardActor()
    for _ in range(2):
        assert board.take("unit", "process 1", "node")
        board.batch_done("unit", 250, 1000)
    counts = board.read([])
    assert (counts.rows, counts.tokens) == (250, 1000)
