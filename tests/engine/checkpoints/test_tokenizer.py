"""A checkpoint's tokenizer, its chat template and what ends its texts."""

import json
import re
from pathlib import Path

import pytest

from engine import Engine, ModelError, Tokenizer
from tests.engine.checkpoints.model_files import edit_config


def test_a_checkpoint_without_tokenizer_is_refused_by_name(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"tokenizer .*copy"):
        Engine.load(str(copied))


def test_a_chat_needs_a_template(whole: Path) -> None:
    tokenizer = Tokenizer.load(str(whole))
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_chat("hello")


def test_the_end_of_sequence_is_the_generation_configs_else_the_tokenizers(copied: Path) -> None:
    file = copied / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokenizer.load(str(copied)).eos_ids == (7, 9)
    file.write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(str(copied)).eos_ids == (5,)
    file.write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer.load(str(copied)).eos_ids == (0,)
    file.unlink()
    assert Tokenizer.load(str(copied)).eos_ids == (0,)
    edit_config(copied, eos_token_id=[7, 9])
    assert Tokenizer.load(str(copied)).eos_ids == (7, 9, 0), "without a generation config, what either says"
    file.write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(str(copied)).eos_ids == (5,)


@pytest.mark.parametrize("said", ["abc", [None], [7, "9"], True, 2.0, -1])
def test_an_end_token_that_is_no_number_of_a_token_is_refused_naming_file_and_value(copied: Path, said: object) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(ModelError, match=rf"generation_config\.json' names {re.escape(repr(said))} as eos_token_id"):
        Tokenizer.load(str(copied))
