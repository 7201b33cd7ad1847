"""The safetensors files of a checkpoint directory: looked over by their headers, then read tensor by tensor."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.json_text import check_is_file, read_json

WHOLE = "model.safetensors"  # of a checkpoint in one file, which then counts alone
INDEX = "model.safetensors.index.json"
MOST_INDEX = 2**27  # bytes
COMPUTABLE = {"F64", "F32", "F16", "BF16"}
# Buffers that some checkpoints keep, none of which is read.
IGNORED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "position_ids")
_WAY_OUT = "this engine computes float32, bfloat16 and float16 weights: name the model that it was made from"


class Weights:
    """Tensors of a checkpoint directory by name, read on demand and converted to one dtype on the CPU."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        """Raises ModelError: a file is missing or damaged, or holds quantised tensors."""
        self.dtype = dtype
        self._file_of: dict[str, Path] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, tuple[str, slice]] = {}  # of tensors that are divided: which, and its rows
        whole = directory / WHOLE
        index = None if whole.is_file() else _read_index(directory)
        if index is not None:
            files = sorted(set(index.values()))
        else:
            files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
        for file in files:
            with open_weights(file) as opened:
                for name in opened.keys():  # noqa: SIM118, no mapping
                    tensor = opened.get_slice(name)
                    _check_computable(file, name, tensor.get_dtype())
                    if index is None and name in self._file_of:
                        raise ModelError(
                            f"tensor {name!r} is in {str(self._file_of[name])!r} and in {str(file)!r}, and no {INDEX} "
                            "says which one counts: take the other file away"
                        )
                    self._file_of[name], self._sizes[name] = file, tuple(tensor.get_shape())
        for name, file in (index or {}).items():
            if name not in self._file_of:
                raise ModelError(f"weight file {str(file)!r} has no tensor {name!r}: fetch the checkpoint again")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str) -> torch.Tensor:
        """A copy of one tensor; raises ModelError if the checkpoint lacks it.

        The file is opened anew each time: a mapping that stays open would keep every page read so far resident, and
        loading would peak at twice the weights.
        """
        self._check_has(name)
        whole, rows = self._parts.get(name, (name, ...))
        with open_weights(self._file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(whole)
            return tensor[rows].to(self.dtype, copy=True)

    def divide(self, name: str, whole: str, parts: Mapping[str, int]) -> None:
        """Give parts of a tensor, so many of its rows each, names of their own: `{}` in `name` is whole or the part.

        Raises ModelError if the checkpoint lacks the whole.
        """
        fused, end = name.format(whole), 0
        self._check_has(fused)
        for part, rows in parts.items():
            start, end = end, end + rows
            self._parts[name.format(part)] = fused, slice(start, end)
            self._file_of[name.format(part)] = self._file_of[fused]
            self._sizes[name.format(part)] = (rows, *self._sizes[fused][1:])

    def size(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._sizes[name]

    def check_shapes(self, config: Any) -> None:
        """Raises ModelError, naming a tensor whose shape is not what the config asks for, a bias that is missing or too
        many, or a weight that is missing beside its bias: what else is missing is when it is read.
        """
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                expected = AutoModelForCausalLM.from_config(config).state_dict()
        except Exception:  # a config that nothing can be built of: the model's family says what of it
            return
        for name, tensor in expected.items():
            module, _, part = name.rpartition(".")
            has_bias = f"{module}.bias" in expected
            if (part == "bias" or has_bias) and name not in self:
                raise ModelError(f"the checkpoint has no tensor {name!r}, which config.json asks for: fetch it again")
            if not has_bias and f"{module}.bias" in self:
                raise ModelError(
                    f"the checkpoint holds {module + '.bias'!r}, a bias that config.json says the model has not: mend "
                    "the config (attention_bias, mlp_bias), or fetch the checkpoint again"
                )
            if name in self and (found := self.size(name)) != tuple(tensor.shape):
                raise ModelError(
                    f"tensor {name!r} of {str(self._file_of[name])!r} has shape {list(found)}, config.json asks for "
                    f"{list(tensor.shape)}: fetch the checkpoint again"
                )

    def _check_has(self, name: str) -> None:
        if name not in self:
            raise ModelError(f"the checkpoint has no tensor {name!r}: it is incomplete or of another family")


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """An open safetensors file; raises ModelError naming one that is missing or damaged."""
    try:
        check_is_file(file)
        with safe_open(file, framework="pt") as opened:
            yield opened
    except PermissionError as error:
        raise ModelError(f"weight file {str(file)!r} cannot be read ({error}): let this user read it") from error
    except (OSError, SafetensorError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"weight file {str(file)!r} cannot be read ({error}): fetch the checkpoint again") from error


def check_unambiguous(directory: Path) -> None:
    """Raises ModelError where programs differ in which weight files they read."""
    others = {file.name for file in directory.glob("*.safetensors")} - {WHOLE}
    if (directory / INDEX).is_file():
        others.add(INDEX)
    if (directory / WHOLE).is_file() and others:
        raise ModelError(
            f"{str(directory)!r} holds {min(others)!r} beside {WHOLE}, and vLLM might read that: take it away"
        )


def check_not_quantised(config: Mapping[str, Any], model: str) -> None:
    """Raises ModelError, naming the method, for a config that says its weights are quantised."""
    said = config.get("quantization_config") or config.get("compression_config")
    if said:
        method = said.get("quant_method") if isinstance(said, Mapping) else None
        raise ModelError(f"model {model!r} is quantised ({method or 'by a method it does not name'}): {_WAY_OUT}")


def _check_computable(file: Path, name: str, dtype: str) -> None:
    if dtype not in COMPUTABLE and not name.endswith(IGNORED):
        raise ModelError(f"tensor {name!r} of {str(file)!r} is {dtype}, the model is quantised: {_WAY_OUT}")
    if name.endswith(("_scale", "_scale_inv", ".qweight", ".scales", ".SCB", ".absmax", "_packed", ".weight_scale_2")):
        raise ModelError(f"tensor {name!r} of {str(file)!r} scales others, the model is quantised: {_WAY_OUT}")


def _read_index(directory: Path) -> dict[str, Path] | None:
    """The file of each tensor, or None if there is no index. Raises ModelError."""
    index = directory / INDEX
    if not index.is_file():
        return None
    try:
        found = read_json(index, MOST_INDEX)["weight_map"]
        files = {str(name): str(file) for name, file in found.items()}
        if not files or any(Path(file).name != file or not file.endswith(".safetensors") for file in files.values()):
            raise ValueError("it names something that is no weight file beside it")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"the weights' index {str(index)!r} is damaged ({error!r}): fetch it again") from error
    return {name: directory / file for name, file in files.items()}
