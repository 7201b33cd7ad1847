"""How a schedule is trained."""

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True, slots=True)
class Recipe:
    """AdamW under a warm-up and a cosine; steps end when held-out answers stop getting better, after half of them."""

    steps: int = 200  # at most
    tokens_per_step: int = 768  # answer tokens
    learning_rate: float = 1e-3  # at its highest
    warmup_steps: int = 10  # a quarter of the steps at the most
    final_share: float = 0.05  # of the highest learning rate, left at the last step
    gate_width: int = 0  # of a gated part added to each bridge; 0: none
    adapter_rank: int = 8  # of the changes to every projection that runs above the first bridge; 0: bridges alone
    token_loss: float = 0.1  # weight of the cross-entropy on full depth's own tokens, beside the KL divergence
    judge_every: int = 20  # steps
    patience: int = 5  # judgements without a new best, in the second half of the steps, before training ends
    seed: int = 0  # of the first values of gated parts and adapter and the order of the answers

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "judge_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gate_width", "adapter_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warmup = min(self.warmup_steps, self.steps // 4)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * (self.final_share + (1 - self.final_share) * (1 + cos(pi * done)) / 2)
