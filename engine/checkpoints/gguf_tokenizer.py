"""What transformers leaves out of a GGUF file's tokenizer; as llama.cpp has it, in its src/llama-vocab.cpp."""

from typing import Any

import numpy as np

# By tokenizer.ggml.pre, how a byte-level tokenizer splits a text: as GPT-2's, which transformers takes where it knows
# no better ...
AS_GPT2 = {
    "default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion",
    "granite-docling",
}  # fmt: skip
# ... or so once every digit stands alone.
DIGITS_FIRST = {
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
}  # fmt: skip
# A word of the vocabulary is one token, whatever the merges say; a text begins with BOS unless the file says otherwise,
# as with SentencePiece.
WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip

TURN_ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
    "_<EOT>",
}  # fmt: skip
WHOLE_IN_TEXT = (3, 4)  # of token_type: control tokens and user-defined ones


def splits(values: dict[str, Any]) -> bool:
    """Whether a converted tokenizer splits text as the file says."""
    name = str(values.get("tokenizer.ggml.pre", "default"))
    if values.get("tokenizer.ggml.model") != "gpt2" or name in AS_GPT2 | DIGITS_FIRST:
        return True
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # a transformers that splits by the model's family, whatever the file says
        return False
    return name in GGUF_PRE_TOKENIZER_SPLITS


def complete(tokenizer: Any, values: dict[str, Any]) -> None:
    """Give the tokenizer that transformers made of a file what it left out."""
    from tokenizers import decoders, pre_tokenizers

    backend, split = tokenizer.backend_tokenizer, values.get("tokenizer.ggml.pre")
    pieces = values["tokenizer.ggml.model"] == "llama"  # SentencePiece's, which are split in no such way
    if not pieces and split in DIGITS_FIRST:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if not pieces and split in WHOLE_WORDS:
        backend.model.ignore_merges = True
    if (pieces or split in WHOLE_WORDS) and "tokenizer.ggml.add_bos_token" not in values:
        tokenizer.add_bos_token = tokenizer.bos_token is not None
    if pieces and values.get("tokenizer.ggml.add_space_prefix") is False:  # Gemma's begins none so already
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def lost_token(tokenizer: Any, values: dict[str, Any]) -> str | None:
    """A token that stands whole in a text, or at its ends, and that this tokenizer makes something else of."""
    words, types = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.token_type")
    known = types[: len(words)] if isinstance(types, np.ndarray) else np.empty(0)
    for token in [*_named(values, "bos", "eos", "padding"), *np.flatnonzero(np.isin(known, WHOLE_IN_TEXT)).tolist()]:
        word = words[token]
        if tokenizer.convert_tokens_to_ids(word) == token:
            continue
        if tokenizer.encode(word, add_special_tokens=False) != [token]:  # runs of spaces, which Gemma's respells, are
            return str(word)
    return None


def end_tokens(values: dict[str, Any]) -> list[int]:
    """Tokens that end an answer, those that keys name and words that end a turn: transformers reads but the first."""
    words = values["tokenizer.ggml.tokens"]
    ends = [token for token, word in enumerate(words) if word in TURN_ENDS]
    return list(dict.fromkeys([*_named(values, "eos", "eot", "eom"), *ends]))


def _named(values: dict[str, Any], *keys: str) -> list[int]:
    """Of the tokens that keys name, those that there are."""
    found = [values.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    return [token for token in found if type(token) is int and 0 <= token < len(values["tokenizer.ggml.tokens"])]
