"""A look over a GGUF file's header before anything trusts its numbers: readers allocate and loop as it says."""

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.checkpoints.gguf_tokenizer import splits
from engine.errors import ModelError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TOKEN_TYPES = "tokenizer.ggml.token_type"  # of arrays of numbers, the one that is looked at
LONGEST_HEADER = 1 << 28  # bytes: a vocabulary of 256,000 words and its merges takes some 10 MB
MOST_TENSORS, MOST_KEYS, LONGEST_CONTEXT = 1 << 17, 1 << 14, 1 << 27


def check_gguf(path: Path) -> dict[str, Any]:
    """Values of the header, by key. Raises ModelError unless it is whole, its tensors lie in the file, its sizes agree
    with theirs, and transformers' conversion keeps what it says.
    """
    try:
        with path.open("rb") as stream:
            values, tensors = _Header(stream, path.stat().st_size).read()
        parts = values.get("split.count", 1)
        is_phi3 = values.get("general.architecture") == "phi3"
        if (whole := parts in (0, 1)) and not is_phi3:
            _check_sizes(values, tensors)
    except (OSError, ValueError, struct.error, TypeError, OverflowError) as error:
        raise ModelError(f"GGUF file {str(path)!r} is damaged ({error}): fetch it again") from error
    if not whole:
        raise ModelError(
            f"GGUF file {str(path)!r} is one of the {parts} parts of a model: name the whole file, which "
            "llama-gguf-split --merge makes of them, or the safetensors model"
        )
    if is_phi3:
        raise loss(path, "a Phi-3's sliding window, and which part of its heads positions turn,")
    if lost := _lost(values, tensors):
        raise loss(path, lost)
    return values


def loss(path: Path, lost: str) -> ModelError:
    """What to raise for a file that conversion would take something from."""
    return ModelError(f"GGUF file {str(path)!r} would lose {lost} when converted: name the safetensors model instead")


class _Header:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """Values by key, and each tensor's sizes, innermost first."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, count, keys = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")
        if count > MOST_TENSORS or keys > MOST_KEYS:
            raise ValueError(f"it claims {count} tensors and {keys} keys")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in values:
                raise ValueError(f"key {key!r} stands in it twice")
            values[key] = self._value(self._number("I"), keep=key == TOKEN_TYPES)
        tensors: dict[str, tuple[int, ...]] = {}
        ends = []
        for _ in range(count):
            name = self._string()
            if name in tensors:
                raise ValueError(f"tensor {name!r} stands in it twice")
            dimensions = self._number("I")
            if not 1 <= dimensions <= 4:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            tensors[name] = tuple(self._number("Q") for _ in range(dimensions))
            ends.append((name, self._number("I"), self._number("Q")))
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}")
        from gguf import GGML_QUANT_SIZES  # elements of a block and its bytes, by type of tensor

        data = -(-self._stream.tell() // alignment) * alignment
        for name, kind, offset in ends:
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"tensor {name!r} is of type {kind}, which is not known")
            elements, size = GGML_QUANT_SIZES[kind]
            total = math.prod(tensors[name])
            if not total or tensors[name][0] % elements:
                raise ValueError(f"tensor {name!r} has sizes {list(tensors[name])}")
            if offset % alignment or data + offset + total // elements * size > self._size:
                raise ValueError(f"tensor {name!r} lies beyond the end of the file, which is {self._size} bytes long")
        return values, tensors

    def _value(self, kind: int, keep: bool) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"a value is of type {kind}, which is not known")
        of, count = self._number("I"), self._number("Q")
        if of in SCALARS:
            size = count * struct.calcsize(f"<{SCALARS[of]}")
            if keep:
                return np.frombuffer(self._bytes(size), f"<{SCALARS[of]}")
            self._stream.seek(self._end(size))
            return None
        if of != STRING or count > self._size // 8:
            raise ValueError(f"an array claims {count} values of type {of}")
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _bytes(self, count: int) -> bytes:
        self._end(count)
        return self._stream.read(count)

    def _end(self, count: int) -> int:
        """Where so many bytes from here on end."""
        end = self._stream.tell() + count
        if end > self._size:
            raise ValueError(f"it ends within its header, after {self._size} bytes")
        if end > LONGEST_HEADER:
            raise ValueError(f"its header is longer than {LONGEST_HEADER} bytes")
        return end


# Layers of those Gemma models, 27B both, whose attention has another scale than the family's others. No file says it.
OF_ANOTHER_SCALE = {"gemma2": 46, "gemma3": 62}


def _lost(values: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> str | None:
    """What transformers reads from no GGUF file, if the model has it."""
    family = values["general.architecture"]
    factor = values.get(f"{family}.rope.scaling.factor", values.get(f"{family}.rope.scale_linear", 1))
    scaling = values.get(f"{family}.rope.scaling.type", "none" if factor in (0, 1) else "linear")  # as llama.cpp reads
    if scaling != "none" or "rope_freqs.weight" in tensors:  # of Llama 3.1 and later, the factors are a tensor
        return "its RoPE scaling"
    if values.get(f"{family}.block_count") == OF_ANOTHER_SCALE.get(family):
        return "its attention's scale"
    if family == "llama" and any(name.startswith("blk.") and name.endswith(".bias") for name in tensors):
        return "its biases"
    if not splits(values):
        return "its way of splitting text"
    return None


def _check_sizes(values: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    """That what a model would be built by is what the tensors are: or gigabytes would be allocated for a typo."""
    family = values.get("general.architecture")
    if not isinstance(family, str):
        raise ValueError("it has no general.architecture")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ValueError("it has no tensor 'token_embd.weight'")

    def number(key: str, default: int | None = None) -> int:
        found = values.get(f"{family}.{key}", default)
        if type(found) is not int or not 1 <= found < 1 << 31:
            raise ValueError(f"{family}.{key} is {found!r}")
        return found

    width, vocabulary = embedding
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    blocks = number("block_count")
    heads = number("attention.head_count")
    groups, head = number("attention.head_count_kv", heads), number("attention.key_length", max(1, width // heads))
    wanted: dict[str, tuple[int, int]] = {}
    for layer in range(min(blocks, len(layers))):
        wanted[f"blk.{layer}.attn_q.weight"] = (width, heads * head)
        wanted[f"blk.{layer}.attn_k.weight"] = (width, groups * head)
        wanted[f"blk.{layer}.ffn_up.weight"] = (width, number("feed_forward_length"))
    for key, found in {"embedding_length": width, "block_count": len(layers), "vocab_size": vocabulary}.items():
        if (claimed := number(key, vocabulary if key == "vocab_size" else None)) != found:
            raise ValueError(f"{family}.{key} is {claimed}, its tensors say {found}")
    if number("context_length", 1) > LONGEST_CONTEXT or heads % groups:
        raise ValueError(f"its context is {number('context_length', 1)} and its heads are {heads} in {groups} groups")
    for name, sizes in wanted.items():
        if tensors.get(name, sizes) != sizes:
            raise ValueError(f"tensor {name!r} has sizes {list(tensors[name])} where {list(sizes)} belong")
    words = values.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or len(words) > vocabulary:
        raise ValueError("its tokenizer does not fit its embeddings")
