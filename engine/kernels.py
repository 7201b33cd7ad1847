"""Matrix products and attention, per device. Everything above is the same code on every device."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.shape import AttentionKind

Linear = Callable[[Tensor], Tensor]  # [N, in] -> [N, out]

RAGGED_THREADS = 3  # of torch's attention are about as fast as one core with `ragged_attention`
QUERIES = 256  # that attend together: what later ones alone see is not computed for them

_LEAST = 1e-30  # stands for a largest number of zero, to divide by


class KeptRows:
    """What B rows of a block have kept, and whose newest tokens attend to it."""

    def __init__(self, tokens: Sequence[int], lengths: Sequence[int], window: int | None, device: torch.device) -> None:
        """Rows of `lengths` [B], their newest token included, which is one of `tokens` [B] of those that attend.
        Each sees all that its row keeps, or the last `window`.
        """
        self.longest = max(lengths)
        self.seen = sum(min(length, window or length) for length in lengths)
        self.tokens = torch.tensor(tokens, device=device)  # [B]
        self.rows = torch.arange(len(tokens), device=device)  # [B]
        self.end = torch.tensor(lengths, device=device)  # [B]
        self.newest = self.end - 1  # [B]
        self.first = torch.zeros_like(self.end) if window is None else (self.end - window).clamp_(min=0)  # [B]
        self._mask: Tensor | None = None

    @property
    def padding(self) -> int:
        """How many tokens rows would read beyond what they see, if all read as many as the longest."""
        return len(self.rows) * self.longest - self.seen

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, longest], 0 where a token is seen, -inf elsewhere."""
        if self._mask is None:
            slots = torch.arange(self.longest, device=self.end.device)
            unseen = (slots >= self.end[:, None]) | (slots < self.first[:, None])
            mask = torch.zeros(unseen.shape, dtype=dtype, device=slots.device)
            self._mask = mask.masked_fill_(unseen, -torch.inf)[:, None, None]
        return self._mask


class Kernels:
    """Portable kernels in plain torch."""

    states: torch.dtype | None = None  # of hidden states and of logits, where that is not the weights' precision
    kept: torch.dtype | None = None  # of keys and values, where that is not the states' precision
    keeps_weights = True  # as they are given, not in a layout of their own

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """x -> x W' + b for a weight of [out, in]."""
        return lambda x: F.linear(x, weight, bias)

    def inner_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `linear`, within a unit or of keys and values: in the weight's precision where states are in another."""
        return self.linear(weight, bias)

    def rough_linear(self, weight: Tensor, bias: Tensor) -> Linear:
        """As `linear`, where a hundredth of the products' deviation may be lost for speed."""
        return self.linear(weight, bias)

    def chosen_products(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """x [N, in] times the rows of a weight [out, in] that are chosen for each of them, [N, count]: [N, count]."""
        return torch.bmm(F.embedding(chosen, weight), x.unsqueeze(-1)).squeeze(-1)

    def largest(self, x: Tensor, count: int) -> Tensor:
        """Where the largest numbers of each row of x [N, width] are, [N, count], in any order."""
        return x.topk(count, sorted=False).indices

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, x: Tensor, factors: Tensor) -> Tensor:
        """Interleaved queries and keys [N, heads, head_dim] times `Rotary.factors` [N, 1, head_dim / 2], in float32."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)

    def prompt_attention(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        """Causal attention of the last m of a prompt's n tokens.

        Args:
            q: [m, heads, head_dim].
            k, v: [n, kv_heads, head_dim].
            kind: the layer's scale, window and soft cap.

        Returns:
            [m, heads * head_dim].
        """
        before, window = len(k) - len(q), min(kind.window or len(k), len(k))
        # Without a mask a GPU's fused kernels take grouped heads in 16 bits alone.
        fused = not q.is_cuda or q.shape[1] == k.shape[1] or q.itemsize == 2
        if not before and window == len(k) and kind.softcap is None and fused:
            return self._attention(q, k, v, kind, None)
        attended = []
        for start in range(0, len(q), QUERIES):
            end = min(start + QUERIES, len(q))
            first, last = max(0, before + start + 1 - window), before + end  # of the keys that some of these see
            own = before + start - first  # where the first of them is among the keys
            seen = q.new_ones(end - start, last - first, dtype=torch.bool).tril_(own).triu_(own + 1 - window)
            attended.append(self._attention(q[start:end], k[first:last], v[first:last], kind, seen))
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, seen: Tensor | None) -> Tensor:
        """To the keys that each query sees, [m, n]; None: as many queries as keys, which see those before."""
        if q.is_cuda and seen is not None and kind.softcap is None:
            return grouped_attention(q, k, v, kind, seen)
        heads, kv_heads = q.shape[1], k.shape[1]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_dim]
        if kind.softcap is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=kind.scale, enable_gqa=heads != kv_heads
            )
        else:
            assert seen is not None
            if heads != kv_heads:
                k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = _cap(q @ k.transpose(-1, -2) * kind.scale, kind.softcap).masked_fill(~seen, -torch.inf)
            out = scores.float().softmax(-1).to(v.dtype) @ v
        return out[0].transpose(0, 1).flatten(1)

    def packed_attention(
        self, q: Tensor, lengths: list[int], prompts: Sequence[tuple[Tensor, Tensor]], kind: AttentionKind
    ) -> Tensor:
        """`prompt_attention` of several prompts, [N, heads * head_dim], whose last tokens are laid end to end.

        So many queries of q [N, heads, head_dim] as `lengths` says are of each prompt; `prompts` are keys and values of
        each, of all its n tokens, [n, kv_heads, head_dim].
        """
        # Split at once: slices would each have a gradient of q's size.
        pairs = zip(q.split(lengths), prompts, strict=True)
        return torch.cat([self.prompt_attention(ours, k, v, kind) for ours, (k, v) in pairs])

    def pads(self, kind: AttentionKind) -> bool:
        """Whether `decode_attention` reads as many tokens for each row of a block as for the longest."""
        return True

    def decode_attention(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[tuple[Tensor, KeptRows]], kind: AttentionKind
    ) -> Tensor:
        """One new token per row joins its row's cache, and attends to it.

        Args:
            q: [N, heads, head_dim].
            k, v: [N, kv_heads, head_dim].
            blocks: keys and values [2, B, kv_heads, slots, head_dim] of rows that have places side by side, changed,
                and what these rows see.
            kind: the layer's scale and soft cap.

        Returns:
            [N, heads * head_dim].
        """
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for pair, kept in blocks:
            pair[0, kept.rows, :, kept.newest] = k[kept.tokens]
            pair[1, kept.rows, :, kept.newest] = v[kept.tokens]
            keys, values = pair[:, :, :, : kept.longest]
            out[kept.tokens] = self.kept_attention(q[kept.tokens], keys, values, kept, kind)
        return out

    def kept_attention(self, q: Tensor, k: Tensor, v: Tensor, kept: KeptRows, kind: AttentionKind) -> Tensor:
        """Of one token per row, [B, heads * head_dim].

        The query heads that share a key/value head are its "query length": grouped heads cost no copy of the cache.
        q is [B, heads, head_dim], k and v are [B, kv_heads, longest, head_dim].
        """
        rows, heads, head_dim = q.shape
        grouped, mask = q.view(rows, k.shape[1], -1, head_dim), kept.mask(k.dtype)  # [B, kv_heads, group, head_dim]
        if kind.softcap is None:
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=kind.scale)
        else:
            scores = _cap(grouped @ k.transpose(-1, -2) * kind.scale, kind.softcap) + mask
            out = scores.softmax(-1) @ v
        return out.reshape(rows, heads * head_dim)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, seen: Tensor) -> Tensor:
    """Attention of m queries to those of n keys that each sees, [m, heads * head_dim].

    The query heads that share a key/value head are queries side by side: no fused kernel of a GPU takes a mask and
    grouped heads together, and the one that is no fused one keeps all scores, in float32. q is [m, heads, head_dim],
    k and v are [n, kv_heads, head_dim], `seen` is [m, n], of bool.
    """
    group = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group x m, head_dim]
    q, k, v = (x.unsqueeze(0) for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.repeat(group, 1), scale=kind.scale)[0]
    shared: Tensor = out.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1)
    return shared


def attended_alone(v: Tensor, heads: int) -> Tensor:
    """What tokens that attend to nothing but themselves attend to, [N, heads * head_dim]: values [N, kv_heads,
    head_dim].
    """
    return v.repeat_interleave(heads // v.shape[1], 1).flatten(1)


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap


class OneDnnKernels(Kernels):
    """CPU, float32: weights are packed once into oneDNN's blocked layout.

    At the few rows of a decode batch plain GEMM spends much of its time re-ordering the weights; packed, the products
    of the packaged model run 1.3 to 2.5 times as fast with 8 or 32 rows on two AVX2 cores.
    """

    keeps_weights = False

    def __init__(self) -> None:
        with warnings.catch_warnings():  # torch says once that sparse tensors are in beta
            warnings.simplefilter("ignore")
            _sparse(torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0), (0, 0))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As above; torch's own is eight small operations on a CPU, this is half of them."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = _packed(weight)
        return lambda x: _times(x, packed, bias)

    def rough_linear(self, weight: Tensor, bias: Tensor) -> Linear:
        """As above, in 8-bit integers where the CPU has instructions for them.

        A quarter of the weights' bytes: 32 rows of 192 numbers to 49,152 in 1.3 ms, not 3.8 ms.
        """
        if not _integers_are_exact():
            return self.linear(weight, bias)
        steps = (weight.abs().amax(1) / 127).clamp_(min=_LEAST)  # of each output's weights
        packed = torch.ops.onednn.qlinear_prepack((weight / steps[:, None]).round_().to(torch.int8), None)
        zeros, apply = torch.zeros(len(weight), dtype=torch.long), torch.ops.onednn.qlinear_pointwise

        def product(x: Tensor) -> Tensor:
            largest = x.abs().amax(1, keepdim=True).clamp_(min=_LEAST)  # a row is not to depend on others
            whole = (x * (127 / largest)).round_().add_(128).to(torch.uint8)
            out: Tensor = apply(whole, 1 / 127, 128, packed, steps, zeros, None, 1.0, 0, torch.float32, "none", [], "")
            return torch.addcmul(bias, out, largest, out=out)

        return product

    def chosen_products(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """As above, without a copy of the chosen rows: for 256 of 576 numbers in each of 32 rows 0.8 ms, not 2.9 ms."""
        rows, count = chosen.shape
        ends = torch.arange(0, rows * count + 1, count)
        places = _sparse(ends, chosen.flatten(), x.new_zeros(rows * count), (rows, len(weight)))
        products: Tensor = torch.sparse.sampled_addmm(places, x, weight.T, beta=0.0).values()
        return products.view(rows, count)

    def pads(self, kind: AttentionKind) -> bool:
        """Unless `ragged_attention` does it, on one core."""
        return kind.softcap is not None or torch.get_num_threads() > RAGGED_THREADS or _ragged_attention() is None

    def decode_attention(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[tuple[Tensor, KeptRows]], kind: AttentionKind
    ) -> Tensor:
        """As above: for 24 rows of 120 to 192 tokens on one core in 0.25 to 0.35 ms, not 0.77 ms."""
        ragged = _ragged_attention()
        if ragged is None or self.pads(kind):
            return super().decode_attention(q, k, v, blocks, kind)
        out = torch.empty(q.shape)
        queries, keys, values = (_bits(x.contiguous()) for x in (q.float(), k, v))
        for pair, kept in blocks:
            tokens, first, end = kept.tokens.numpy(), kept.first.numpy(), kept.end.numpy()
            scores = torch.empty(len(tokens), q.shape[1], kept.longest)
            ragged.score(queries, keys, _bits(pair[0]), tokens, first, end, np.float32(kind.scale), scores.numpy())
            ragged.weigh(scores.softmax(-1).numpy(), values, _bits(pair[1]), tokens, first, end, out.numpy())
        return out.flatten(1).to(q.dtype)

    def largest(self, x: Tensor, count: int) -> Tensor:
        """As above; numpy selects with vector instructions: 256 of 6,144 in 32 rows in 0.4 ms, not 1.2 ms."""
        return torch.from_numpy(np.argpartition(x.numpy(), -count, axis=-1)[:, -count:])


class HalfOneDnnKernels(OneDnnKernels):
    """CPU that multiplies bfloat16 numbers: matrices, what units compute, keys and values are of these, hidden states
    and logits are in float32.

    Such products run at 1.7 to 1.9 times the rate of float32 ones on an AMD EPYC with AVX-512, at four times that rate
    on an Intel Xeon with AMX.
    """

    states, kept = torch.float32, torch.bfloat16

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = _packed(weight.to(torch.bfloat16))
        return lambda x: _rounded_times(x, packed, bias)

    def inner_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed, bias = _packed(weight.to(torch.bfloat16)), None if bias is None else bias.to(torch.bfloat16)
        return lambda x: _times(x.to(torch.bfloat16), packed, bias)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, seen: Tensor | None) -> Tensor:
        """In float32, as `decode_attention`: a tenth faster than torch's in bfloat16, which rounds in between."""
        if kind.softcap is not None:
            return super()._attention(q, k, v, kind, seen)
        return super()._attention(q.float(), k.float(), v.float(), kind, seen).to(q.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In float32."""
        return super().rms_norm(x.float(), weight, eps)


class FrozenOneDnnKernels(Kernels):
    """CPU, float32: for training through weights that stay as they are. Gradients flow to what is multiplied by them.

    Packed as by `OneDnnKernels`, and transposed too once a gradient has passed: on an AMD EPYC with AVX-512 such
    products ran 1.1 to 1.4 times as fast as torch's plain ones. Where the CPU multiplies bfloat16 numbers, products
    are of these, at 1.7 to 1.9 times the rate, unless gradients are off, as they are in judging.
    """

    keeps_weights = False

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return _Frozen(weight, bias, torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32)


class FrozenHalfKernels(Kernels):
    """GPU, float32: for training through weights that stay as they are, kept in bfloat16 as in most checkpoints.

    Products are of bfloat16 numbers: a GPU multiplies these some fifteen times as fast as float32 ones. In judging too,
    but for logits, where rounding would decide between tokens that are nearly as likely.
    """

    keeps_weights = False

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        half = self.inner_linear(weight, bias)
        return lambda x: half(x) if torch.is_grad_enabled() else F.linear(x, weight, bias)

    def inner_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        half = weight.detach().to(torch.bfloat16)

        def product(x: Tensor) -> Tensor:
            out = F.linear(x.to(torch.bfloat16), half).float()
            return out if bias is None else out + bias

        return product


class _Frozen:
    """A product with a packed weight, and its gradient's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, learning: torch.dtype) -> None:
        """`learning`: of the numbers that are multiplied, unless gradients are off."""
        self._whole, self.bias, self._learning = _packed(weight.detach()), bias, learning

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _times(x, self._whole, self.bias)
        if not x.requires_grad:
            return _rounded_times(x, self.forward, self.bias)
        out: Tensor = _FrozenProduct.apply(x, self)
        return out

    @cached_property
    def forward(self) -> Tensor:
        """The weight to learn through."""
        return self._whole if self._learning == torch.float32 else _packed(self._whole.to_dense().to(self._learning))

    @cached_property
    def backward(self) -> Tensor:
        """Transposed."""
        return _packed(self._whole.to_dense().to(self._learning).T.contiguous())


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: _Frozen) -> Tensor:
        ctx.frozen = frozen
        return _rounded_times(x, frozen.forward, frozen.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _rounded_times(gradients[0].contiguous(), ctx.frozen.backward, None), None


@cache
def _ragged_attention() -> ModuleType | None:
    """None where there is no numba, or none for this Python; and beside vLLM, which looks into every module that is
    loaded when it starts on a CPU, and fails at numba's.
    """
    vllm = find_spec("vllm")
    if vllm is not None and vllm.origin is not None:  # more than a folder of that name
        return None
    try:
        from engine import ragged_attention
    except ImportError:
        return None
    return ragged_attention


def _bits(x: Tensor) -> Any:
    """For numba, which knows no bfloat16: the same memory."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _packed(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout, for products of few rows and many."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return packed


def _times(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _rounded_times(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """As `_times`, x rounded to the weight's precision; in float32."""
    out = _times(x.to(packed.dtype), packed, None).float()
    return out if bias is None else out.add_(bias)


@cache
def _integers_are_exact() -> bool:
    """Whether sums of 8-bit products are right: without VNNI, or where oneDNN is told to do without, they overflow."""
    if not torch.cpu._is_vnni_supported():
        return False
    x, weight = torch.full((32, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127, dtype=torch.int8)
    packed, apply = torch.ops.onednn.qlinear_prepack(weight, None), torch.ops.onednn.qlinear_pointwise
    steps, zeros = torch.ones(64), torch.zeros(64, dtype=torch.long)
    out: Tensor = apply(x, 1.0, 0, packed, steps, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return bool((out == 255 * 127 * 64).all())


def _sparse(ends: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A matrix that has these values in these columns, those of a row up to its end."""
    return torch.sparse_csr_tensor(ends, columns, values, size, check_invariants=False)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels for a device and weights of a dtype."""
    if not _packs(device):
        return Kernels()
    if dtype == torch.float32:
        return OneDnnKernels()
    return HalfOneDnnKernels() if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported() else Kernels()


def training_kernels_for(device: torch.device) -> Kernels:
    """The fastest that let gradients pass through a float32 model whose weights are not trained."""
    # Before compute capability 8.0 GPUs have no units for bfloat16 numbers.
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0):
        return FrozenHalfKernels()
    return FrozenOneDnnKernels() if _packs(device) else Kernels()


def _packs(device: torch.device) -> bool:
    on_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return on_cpu and hasattr(torch.ops.mkldnn, "_linear_pointwise")
