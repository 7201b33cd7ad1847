"""A checkpoint's tokenizer, its chat template and what ends its texts."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaTokenizer

from engine import Engine, ModelError, Tokenizer, checkpoint_directory
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


def test_a_tokenizer_is_what_its_file_holds_though_its_class_is_said_to_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint_directory("smollm2-135m-instruct")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(whole / name, tmp_path / name)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    text = "Hello world, this is\n12 apples"
    expected = Tokenizer(whole).encode(text)
    assert Tokenizer(tmp_path).encode(text) == expected
    # Some versions of transformers do as the class says.
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **_: LlamaTokenizer.from_pretrained(path))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text
    assert tokenizer.eos_ids == Tokenizer(whole).eos_ids
