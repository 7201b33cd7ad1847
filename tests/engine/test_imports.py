"""The import rule, for what lies outside the project; `make lint` holds that of its own folders."""

import ast
import sys
from pathlib import Path

import engine


def test_the_engine_imports_torch_and_the_hugging_face_stack_and_nothing_else() -> None:
    """No Ray, no pydantic, no storage, no package above it; vLLM where schedules run inside it, and what the stack
    brings along where its own words are needed."""
    allowed = {"engine", "torch", "transformers", "numpy", "safetensors", "filelock", "huggingface_hub"}
    files = list(Path(engine.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        here = allowed | {"vllm"} if file.parent.name == "vllm" else allowed
        here = here | {"gguf"} if file.name == "gguf_file.py" else here  # as transformers does for such a file
        here = here | {"numba", "llvmlite"} if file.name == "ragged_attention.py" else here  # which can be missing
        here = here | {"tokenizers"} if file.name == "gguf_tokenizer.py" else here  # what transformers' consist of
        here = here | {"jinja2"} if file.name == "tokenizer.py" else here  # what transformers renders chats by, raises
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root in here or root in sys.stdlib_module_names, f"{file.name} imports {name}"
