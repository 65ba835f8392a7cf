"""Attention of ragged batches over the paged cache.

Once per forward the spans of a batch are split into *segments*, each one call of scaled-dot-product
attention. A layer then writes its new keys and values and runs the segments:

    decoding, consecutive blocks   a strided view of the cache, no copy
    decoding, scattered blocks     keys gathered
    several decoding sequences     gathered together, padded on the left, one call
    several with long contexts     one call each, as above
    prefill chunks                 one call each

If there are few query rows, those of all query heads that share a KV head are folded into one
matrix, ``[kv_heads, group * rows, width]``. One row on a CPU in bf16 (18 heads over 6, 300 keys)
takes 97 microseconds; with ``enable_gqa`` 578, with expanded keys 626. An int8 cache is dequantised
for each segment.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.model.paged.int8 import INT8, decode, encode
from paceline.model.paged.segments import AttentionSegment, AttentionStep

# The running forward's step. A context variable, as not every layer passes on keyword arguments.
STEP: ContextVar[AttentionStep] = ContextVar("attention_step")


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    step: AttentionStep,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the rows' keys and values into the cache, then attend. ``query`` is ``[1, heads, T,
    k_width]``, ``key`` and ``value`` ``[1, kv_heads, T, width]`` after rotary embedding; the result
    is ``[1, T, heads, v_width]``. ``softcap`` c makes a score s ``c * tanh(s / c)`` (Gemma 2).
    ``sinks [heads]`` are additional logits in each softmax, without a value (GPT-OSS)."""
    keys, values = step.cache.kv(layer)
    _store(keys, key, step)
    _store(values, value, step)
    layout = step.layouts[layer]
    outputs = [
        _attend(segment, query, keys, values, scaling, softcap, sinks)
        for segment in layout.segments
    ]
    joined = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    order = layout.order
    return joined if order is None else joined.index_select(1, order)


def _store(cache: Tensor, new: Tensor, step: AttentionStep) -> None:
    """Write ``new [1, kv_heads, T, width]`` into the slots of the step's rows."""
    if cache.dtype == INT8:
        new = encode(new)
    if step.first_slot is None:
        cache.index_copy_(0, step.batch.slots, new[0].transpose(0, 1))
    else:
        _view(cache, step.first_slot, new.shape[2]).copy_(new)


def _view(cache: Tensor, slot: int, length: int) -> Tensor:
    """A view ``[1, kv_heads, length, width]`` of consecutive slots from ``slot`` on."""
    _, heads, width = cache.shape
    row, head, one = cache.stride()
    return cache.as_strided(
        (1, heads, length, width), (0, head, row, one), cache.storage_offset() + slot * row
    )


def _rows_of(cache: Tensor, segment: AttentionSegment, part: str) -> Tensor:
    """The segment's keys or values ``[batch, kv_heads, keys, width]``; ``part`` is "keys" or
    "values". All layers gather into the same memory, as new memory costs a third of the copy."""
    if segment.gather is None:
        assert segment.slot is not None
        return _view(cache, segment.slot, segment.keys)
    _, heads, width = cache.shape
    slots = segment.staging.numbers[segment.gather]
    into = segment.scratch.get((part, heads * width))
    if into is None:
        into = segment.scratch[part, heads * width] = cache.new_empty(len(slots), heads * width)
    torch.index_select(cache.view(-1, heads * width), 0, slots, out=into)
    return into.view(segment.batch, segment.keys, heads, width).transpose(1, 2)


def _attend(
    segment: AttentionSegment,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The outputs ``[1, batch * rows, heads, v_width]`` of a segment."""
    batch, rows = segment.batch, segment.rows
    mask = segment.mask(query.shape[1] // keys.shape[1], query.dtype)
    if segment.pick is not None:
        query = query.index_select(2, segment.staging.numbers[segment.pick])
    elif batch * rows != query.shape[2]:
        query = query.narrow(2, segment.start, batch * rows)
    key, value = _rows_of(keys, segment, "keys"), _rows_of(values, segment, "values")
    if keys.dtype == INT8:
        key, value = decode(key, query.dtype), decode(value, query.dtype)
    if softcap is not None or sinks is not None:
        return _attend_explicitly(segment, mask, query, key, value, scaling, softcap, sinks)
    if not segment.folded:
        group = query.shape[1] // key.shape[1]
        if group > 1 and query.is_cuda and mask is not None:
            # No fused CUDA kernel takes grouped heads together with a mask.
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            group = 1
        out = scaled_dot_product_attention(
            query, key, value, mask, is_causal=segment.causal, scale=scaling, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    folded = _fold(query, batch, rows, key.shape[1])
    folded_rows = folded.shape[2]
    if folded_rows == 1 and folded.dtype == torch.bfloat16 and not folded.is_cuda:
        folded = folded.expand(-1, -1, 2, -1)  # the CPU kernel is slow with a single bf16 row
    out = scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return _unfold(out[:, :, :folded_rows], batch, rows, query.shape[1])


def _fold(query: Tensor, batch: int, rows: int, kv_heads: int) -> Tensor:
    """Fold ``[1, heads, batch * rows, width]`` to ``[batch, kv_heads, group * rows, width]``."""
    _, heads, _, width = query.shape
    query = query[0].reshape(heads, batch, rows, width).transpose(0, 1)
    return query.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _unfold(out: Tensor, batch: int, rows: int, heads: int) -> Tensor:
    """The inverse of _fold, rows before heads: ``[1, batch * rows, heads, width]``."""
    width = out.shape[3]
    return out.reshape(batch, heads, rows, width).transpose(1, 2).reshape(1, -1, heads, width)


def _attend_explicitly(
    segment: AttentionSegment,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in single operators, with a float32 softmax: for soft caps and sinks, which torch's
    fused kernels do not have."""
    batch, rows, heads, kv_heads = segment.batch, segment.rows, query.shape[1], key.shape[1]
    group = heads // kv_heads
    folded = _fold(query, batch, rows, kv_heads)
    scores = torch.matmul(folded, key.transpose(2, 3)).float().mul_(scaling)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if segment.causal:
        above = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(above.repeat(group, 1), float("-inf"))
    elif mask is not None:
        scores = scores.add_(mask if segment.folded else mask.repeat(1, 1, group, 1))
    if sinks is None:
        distribution = scores.softmax(-1)
    else:
        sink = sinks.float().view(kv_heads, group, 1).expand(kv_heads, group, rows)
        sink = sink.reshape(1, kv_heads, group * rows, 1).expand(batch, -1, -1, -1)
        distribution = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    out = torch.matmul(distribution.to(value.dtype), value)
    return _unfold(out, batch, rows, heads)
