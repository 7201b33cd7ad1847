"""How far a next-token distribution is from full depth's."""

from __future__ import annotations

from torch import Tensor


def divergence(full: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(full || ours) in nats, and whether both find the same token likeliest: each [n].

    Args:
        full: log-probabilities at full depth [n, vocab].
        logits: of the same tokens under a schedule [n, vocab].
    """
    full = full.float()
    kl = (full.exp() * (full - logits.float().log_softmax(-1))).sum(-1)
    # Rounding can leave equal distributions just below 0.
    return kl.clamp_min(0), full.argmax(-1) == logits.argmax(-1)
