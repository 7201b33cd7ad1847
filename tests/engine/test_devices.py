"""What the engine chooses for a device."""

from __future__ import annotations

import pytest
import torch

from engine.engine import default_dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_the_default_dtype_is_one_the_device_computes_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_dtype(torch.device("cuda")) == dtype
    assert default_dtype(torch.device("cpu")) == "float32"
