"""Texts are split as a GGUF file says, and end where it says; what would become another text is refused."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from engine import Engine, ModelError, Tokenizer
from engine.checkpoints import checkpoint, gguf_tokenizer


def test_all_that_ends_an_answer_of_a_gguf_file_ends_it(gguf_file: Callable[..., Path]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(5)

    for word in ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"):
        file = gguf_file("chat.gguf", more, word)
        assert Tokenizer.load(str(file)).eos_ids == (0, 7, 5, 256)


def test_the_packaged_model_splits_text_as_it_was_trained_to(packaged: Engine) -> None:
    """As llama.cpp and its own tokenizer.json do: every digit alone, and only then as GPT-2."""
    tokenizer = packaged.tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer.encode("Items:\n\n1. b")] == [
        "Items", ":", "\n\n", "1", ".", " b",
    ]  # fmt: skip
    assert tokenizer.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("word", "split", "tokens"),
    [
        ("12", "gpt-2", [256]),
        ("12", "smollm", [17, 18]),
        ("xy", "gpt-2", [88, 89]),  # no merge leads to the word
        ("xy", "qwen2", [88, 89]),
        ("xy", "llama-bpe", [1, 256]),
        ("xy", "tekken", [1, 256]),
    ],
)
def test_a_gguf_file_splits_text_as_it_says(
    gguf_file: Callable[..., Path], word: str, split: str, tokens: list[int]
) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(split)
        writer.add_bos_token_id(1)

    merges = ["a b", "1 2"] if word == "12" else ["a b"]
    file = gguf_file("split.gguf", more, word, merges=merges)
    assert Tokenizer.load(str(file)).encode(word) == tokens


def test_an_old_transformers_is_not_trusted_to_split_text_as_a_gguf_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    assert gguf_tokenizer.splits(values)
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf.gguf_tokenizer_mapping", None)
    assert not gguf_tokenizer.splits(values)
    assert gguf_tokenizer.splits(values | {"tokenizer.ggml.pre": "smollm"})


def test_a_gguf_file_that_says_so_begins_no_text_with_bos(gguf_file: Callable[..., Path]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(False)

    file = gguf_file("split.gguf", more)
    assert Tokenizer.load(str(file)).encode("ab") == [257]


@pytest.mark.parametrize(("prefix", "first"), [(None, "▁a"), (True, "▁a"), (False, "a")])
def test_a_sentencepiece_text_begins_with_a_space_unless_the_gguf_file_says_otherwise(
    gguf_file: Callable[..., Path], prefix: bool | None, first: str
) -> None:
    words = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"]

    def more(writer: gguf.GGUFWriter) -> None:
        [values] = writer.kv_data
        for key in [key for key in values if key.startswith("tokenizer.ggml.")]:
            del values[key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([-float(token) for token in range(len(words))])
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    file = gguf_file("pieces.gguf", more)
    tokenizer = Tokenizer.load(str(file))
    assert tokenizer.encode("a b") == [1, words.index(first), words.index("▁b")]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.decode([words.index("▁b")]) == ("b" if first == "▁a" else " b")


def test_a_tokenizer_beside_a_gguf_file_is_not_taken_for_its_own(
    gguf_file: Callable[..., Path], original: Path
) -> None:
    file = gguf_file("tiny.gguf")
    shutil.copy(original / "tokenizer.json", file.parent)
    assert Tokenizer(original).encode("ab") != Tokenizer.load(str(file)).encode("ab") == [257]


BAR = "\N{FULLWIDTH VERTICAL LINE}"


@pytest.mark.parametrize("kind", [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED])
def test_a_gguf_file_whose_control_tokens_would_become_text_is_refused_by_one_of_them(
    gguf_file: Callable[..., Path], kind: gguf.TokenType
) -> None:
    """As DeepSeek's are, whose bars no byte-level alphabet has."""
    word = f"<{BAR}User{BAR}>"
    file = gguf_file("chat.gguf", word=word, kind=kind)
    with pytest.raises(ModelError, match=rf"would lose its control token '{word}' .* name the safetensors model"):
        checkpoint.prepare(str(file))
    kept = gguf_file("kept.gguf", word="<|User|>", kind=kind)
    assert Tokenizer.load(str(kept)).encode("a<|User|>b") == [65, 256, 66]


def test_a_gguf_file_whose_end_token_would_become_another_is_refused(gguf_file: Callable[..., Path]) -> None:
    """Transformers would add it again, beyond the vocabulary."""
    end = f"<{BAR}end▁of▁sentence{BAR}>"

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_pad_token_id(256)

    file = gguf_file("chat.gguf", more, end)
    with pytest.raises(ModelError, match=rf"would lose its control token '{end}' .* name the safetensors model"):
        checkpoint.prepare(str(file))
