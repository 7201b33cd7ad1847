"""Products that training is made with have the gradients of plain ones."""

import pytest
import torch

from engine.kernels import FrozenHalfKernels, Kernels, training_kernels_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("half", [False, True])
def test_gradients_pass_frozen_weights_as_plain_ones(rows: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if half and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU does not multiply bfloat16 numbers")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: half)
    draw = torch.Generator().manual_seed(rows)
    weight, bias, x, pull = (torch.randn(size, generator=draw) for size in ((48, 32), (48,), (rows, 32), (rows, 48)))
    found = []
    for kernels in (Kernels(), training_kernels_for(CPU)):
        linear, leaf = kernels.linear(weight, bias), x.clone().requires_grad_()
        out = linear(leaf)
        (out * pull).sum().backward()
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad))
        assert torch.equal(linear(x), out)  # of full depth, to learn from
        with torch.no_grad():
            torch.testing.assert_close(linear(x), x @ weight.T + bias)  # to judge by
    for plain, ours in zip(*found, strict=True):
        if half:
            assert (ours - plain).norm() < 2e-2 * plain.norm()
        else:
            torch.testing.assert_close(ours, plain)


def test_products_of_half_precision_have_gradients_as_close_as_themselves() -> None:
    """As a GPU has them; with weights that are of these numbers, as those of most checkpoints."""
    draw = torch.Generator().manual_seed(1)
    weight, bias, x, pull = (torch.randn(size, generator=draw) for size in ((48, 32), (48,), (7, 32), (7, 48)))
    found = []
    weight = weight.bfloat16().float()
    with torch.no_grad():  # logits to judge by are exact
        assert torch.equal(FrozenHalfKernels().linear(weight, bias)(x), Kernels().linear(weight, bias)(x))
    for kernels in (Kernels(), FrozenHalfKernels()):
        linear, leaf = kernels.linear(weight, bias), x.clone().requires_grad_()
        out = linear(leaf)
        assert out.dtype == torch.float32
        (out * pull).sum().backward()
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad))
    for plain, ours in zip(*found, strict=True):
        assert 1e-5 < (ours - plain).norm() / plain.norm() < 1e-2
