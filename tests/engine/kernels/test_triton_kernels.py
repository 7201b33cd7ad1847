"""The Triton kernels compute what the portable ones do, as far as Triton's interpreter can tell without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="pip install triton")

CASES = Path(__file__).with_name("triton_cases.py")


def test_it_gives_what_float64_gives_and_reads_nothing_beyond_a_row() -> None:
    """Over lengths, windows, soft caps, grouped heads, odd head sizes, splits and dtypes; then what is no attention."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(CASES.parents[3]), *sys.path])
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 21
    for case, differences in found.items():
        if "elementwise" in case:
            assert max(differences.values()) < (2e-2 if "float16" in case else 2e-6), case
            continue
        assert differences["cache"] == 0, case
        assert differences["triton"] < (2e-2 if "float16" in case else 2e-6), case
        assert differences["portable"] < (2e-2 if "float16" in case else 2e-6), case


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 2), ("fp32", 4)])
def test_it_compiles_for_devices_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, dtype: str, bytes_each: int
) -> None:
    """Into machine code with tensor cores in half precision, and a few programs' tiles fit one processor."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.kernels import triton_attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton_attention._attend
    pointers = {**dict.fromkeys(["q", "k", "v", "pair"], f"*{dtype}"), "lengths": "*i64"}
    pointers |= dict.fromkeys(["out", "maxima", "sums"], "*fp32")
    constants = {
        **{"head_dim": 128, "kv_heads": 2, "group_size": 6, "window": 0, "softcap": 0.0},
        **{"GROUP": 16, "WIDTH": 128, "BLOCK": triton_attention.TILE_BYTES // (128 * bytes_each), "SPLITS": 4},
    }
    kinds = {**pointers, "scale": "fp32", **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [name for name in kernel.arg_names if name not in constants and name != "scale"]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared < 48 << 10
    assert ("mma" in compiled.asm["ptx"]) == (dtype == "bf16")
