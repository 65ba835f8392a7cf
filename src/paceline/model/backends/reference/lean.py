"""The forward of a Llama-shaped model in few operations.

A decoder layer of a small model streams 1.6 MB, 40 microseconds' worth, while the module of
``transformers`` spends several hundred on Python and some forty small operations. This loop
computes the same with about twenty. It shares the weights of the modules it is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.core.batch import ModelOutput
from paceline.model.backends.base import Attend
from paceline.model.backends.reference.norms import RMSNorm
from paceline.model.backends.reference.products import Product
from paceline.model.paged.pieces import DeviceBatch

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions ``[T]`` to cosines and sines, each ``[T, 1, head_dim]``; the first half of the sines
is negated, as the formula of the layer wants it."""


class Residual:
    """The residual stream ``x [T, width]``, on CPU stored as ``[x, -x]``: see RMSNorm for why.

    With ``least`` above T, rows of zeros follow: ``padded`` is the stream with them. What they
    become is computed and never read.
    """

    def __init__(self, x: torch.Tensor, least: int = 1) -> None:
        self.rows, self.width = x.shape
        self.doubled = x.device.type == "cpu"
        self.x = self.padded = x
        if self.doubled:
            both = torch.cat((x, x), 1)
            if self.rows < least:
                both = F.pad(both, (0, 0, 0, least - self.rows))
            stride = (2 * self.width, 1)
            self.shape, self.stride, self.both = (both.shape[0], self.width), stride, both
            self.x = both.as_strided(x.shape, stride)
            self.padded = both.as_strided(self.shape, stride)
            self.minus = both.as_strided(self.shape, stride, self.width)

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """All rows with their padding, normalised; on CPU a view of ``[rows, 2 * width]``."""
        if not self.doubled:
            return norm(self.x)
        torch.neg(self.padded, out=self.minus)
        both = torch.layer_norm(self.both, norm.double.shape, norm.double, None, norm.eps)
        return both.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class LeanLayer:
    """One decoder layer: attention and gated MLP, each behind an RMS norm."""

    input_norm: RMSNorm
    qkv: Product
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Product
    mlp_norm: RMSNorm
    gate_up: Product
    down: Product
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float

    def run(
        self,
        index: int,
        stream: Residual,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> None:
        """Add the layer's two updates to ``stream``. ``cos``, ``sin``: ``[T, 1, head_dim]``."""
        normed = stream.normed(self.input_norm)
        stream.x.add_(self.attention(normed, stream.rows, index, cos, sin, attend))
        self.feed_forward(stream)

    def attention(
        self,
        x: torch.Tensor,
        rows: int,
        index: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """``[rows, width]`` from ``x``, whose first ``rows`` rows count."""
        d, heads, kv_heads = self.head_dim, self.heads, self.kv_heads
        rotated = heads + kv_heads
        width = (rotated + kv_heads) * d
        # Views by as_strided: one operation each, a quarter of split, view and transpose.
        qkv = self.qkv(x)
        qk = qkv.as_strided((rows, rotated, d), (width, d, 1))
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), 1)
        # x cos + rotate_half(x) sin; the sign of rotate_half is in the sine's first half.
        qk = torch.mul(qk, cos).addcmul_(qk.roll(d // 2, -1), sin)
        step = rotated * d
        q = qk.as_strided((1, heads, rows, d), (0, d, step, 1))
        k = qk.as_strided((1, kv_heads, rows, d), (0, d, step, 1), heads * d)
        v = qkv.as_strided((1, kv_heads, rows, d), (0, d, width, 1), step)
        attended = attend(q, k, v, layer=index, scaling=self.scaling)
        return self.out(attended.reshape(rows, heads * d))

    def feed_forward(self, stream: Residual) -> None:
        """Add the gated MLP's update to ``stream``."""
        gate_up = self.gate_up(stream.normed(self.mlp_norm))
        padded, ffn = gate_up.shape[0], gate_up.shape[1] // 2
        gate = gate_up.as_strided((padded, ffn), (2 * ffn, 1))
        up = gate_up.as_strided((padded, ffn), (2 * ffn, 1), ffn)
        stream.padded.add_(self.down(F.silu(gate).mul_(up)))


@dataclass(frozen=True)
class LeanModel:
    """Embedding, layers, final norm and head.

    ``least_rows``: products of fewer rows are padded to that many. Weights that come from memory
    pass 15 to 25 % faster by 4 to 6 rows than by 1 or 2 (oneDNN 3.12, one core of Zen 4: 6144 x
    1152 in bf16 takes 770, 920, 650, 660, 680 and 910 microseconds for 1, 2, 4, 5, 6 and 8 rows);
    weights that stay in the processor's cache pass fastest by 1.
    ``skipped``: layers that are left out; the others keep their numbers, so their cache as well.
    """

    embedding: torch.Tensor  # [vocab, width]
    layers: Sequence[LeanLayer]
    norm: RMSNorm
    head: Product
    rotary: Rotary
    least_rows: int = 1
    skipped: frozenset[int] = frozenset()

    def __call__(
        self, batch: DeviceBatch, attend: Attend, features: Sequence[int] = ()
    ) -> ModelOutput:
        """As CausalModel: logits of the wanted rows and the inputs of the layers in ``features``,
        where ``len(layers)`` is the final norm's output."""
        least = self.least_rows
        stream = Residual(torch.embedding(self.embedding, batch.input_ids), least)
        cos, sin = self.rotary(batch.positions)
        kept: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in features:
                kept[index] = stream.x.clone()
            if index in self.skipped:
                continue
            layer.run(index, stream, cos, sin, attend)
        last = len(self.layers)
        if last in features:
            kept[last] = stream.normed(self.norm)[: stream.rows].clone()
        if batch.logit_rows is not None:
            stream = Residual(stream.x.index_select(0, batch.logit_rows), least)
        logits = self.head(stream.normed(self.norm))
        if logits.shape[0] > stream.rows:
            logits = logits[: stream.rows]
        return ModelOutput(logits, {layer: kept[layer] for layer in features})
