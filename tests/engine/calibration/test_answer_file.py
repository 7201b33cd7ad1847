"""Kept answers are those that were drawn, or none."""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.calibration.answer_file import Drawn, read_answers, write_answers
from engine.forward.teacher_forcing import Answer

ANSWERS = [Answer([1, 2, 3], [4, 5]), Answer([6], [7, 8, 9])]


def test_answers_survive_their_file(tmp_path: Path) -> None:
    for drawn in (Drawn(ANSWERS, None), Drawn([], None), Drawn(ANSWERS, 3)):
        write_answers(tmp_path / "answers", drawn, "so")
        assert read_answers(tmp_path / "answers", "so") == drawn
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def test_answers_that_are_damaged_or_of_another_way_are_none(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    assert read_answers(path, "so") is None
    write_answers(path, Drawn(ANSWERS, None), "so")
    assert read_answers(path, "otherwise") is None
    whole, tensors = path.read_bytes(), load_file(path)
    for content in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        assert read_answers(path, "so") is None
    save_file({"tokens": tensors["tokens"]}, path)
    assert read_answers(path, "so") is None
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    for prompts in ("3", "many"):
        save_file(tensors, path, told | {"prompts": prompts})
        assert read_answers(path, "so") is None, "what is there would count for the answers to fewer prompts"
