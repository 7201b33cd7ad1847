"""Kept answers are those that were drawn, or none."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from engine.calibration.answer_file import read_answers, write_answers
from engine.forward.teacher_forcing import Answer

ANSWERS = [Answer([1, 2, 3], [4, 5]), Answer([6], [7, 8, 9])]


def test_answers_survive_their_file(tmp_path: Path) -> None:
    for answers in (ANSWERS, []):
        write_answers(tmp_path / "answers", answers, "so")
        assert read_answers(tmp_path / "answers", "so") == answers
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def test_answers_that_are_damaged_or_of_another_way_are_none(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    assert read_answers(path, "so") is None
    write_answers(path, ANSWERS, "so")
    assert read_answers(path, "otherwise") is None
    whole, tensors = path.read_bytes(), load_file(path)
    for content in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        assert read_answers(path, "so") is None
    save_file({"tokens": tensors["tokens"]}, path)
    assert read_answers(path, "so") is None
