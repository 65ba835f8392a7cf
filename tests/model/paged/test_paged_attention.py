"""Attention over the paged cache against the softmax written out, for every kind of piece."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.core.batch import Span
from paceline.core.tree import chain_parents
from paceline.model.backends.reference.attention import paged_attention
from paceline.model.paged import segments
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.int8 import decode, encode
from paceline.model.paged.segments import FULL, AttentionStep, Pattern, visible

KV_HEADS, GROUP, WIDTH, SIZE = 2, 3, 8, 16
TREE = (-1, -1, 0, 2, 1)
NAN = float("nan")


def feeds_of(kinds: list[tuple[int, tuple[int, ...], int]]) -> list[Span]:
    """Context, tree and pending tokens of each sequence."""
    return [
        Span.of(
            number,
            context,
            [1] * pending,
            parents,
            [0] * len(parents),
        )
        for number, (context, parents, pending) in enumerate(kinds)
    ]


def made(feeds: list[Span], scattered: bool, generator: torch.Generator) -> PagedCache:
    """A cache in which the feeds' contexts lie, in one run each or in blocks here and there; what
    no sequence owns, and what lies beyond its end, is not a number."""
    cache = PagedCache([(KV_HEADS, WIDTH, WIDTH)], 1000, SIZE, torch.float32, "cpu", share=False)
    ends = [f.context + f.pending + len(f.parents) for f in feeds]
    for feed in feeds:
        cache.admit(feed.seq_id, [0])
    step = SIZE if scattered else max(ends)
    for length in range(step, max(ends) + step, step):
        for feed, end in zip(feeds, ends, strict=True):
            cache.reserve(feed.seq_id, min(length, end))
    for tensor in cache.kv(0):
        tensor.fill_(NAN)
        for feed in feeds:
            slots = [cache._slot(feed.seq_id, index) for index in range(feed.context)]
            rows = torch.randn(len(slots), KV_HEADS, WIDTH, generator=generator)
            tensor[torch.tensor(slots, dtype=torch.int64)] = rows
    return cache


def written_out(
    query: torch.Tensor, cache: PagedCache, step: AttentionStep, pattern: Pattern
) -> torch.Tensor:
    """[T, heads, width], one sequence after another in float64."""
    keys, values = cache.kv(0)
    outputs = []
    for span in step.batch.spans:
        slots = torch.tensor([cache._slot(span.seq_id, i) for i in range(span.kv_length)])
        own = query[0, :, span.start : span.start + span.rows].double()
        key = keys[slots].double().repeat_interleave(GROUP, 1).transpose(0, 1)
        value = values[slots].double().repeat_interleave(GROUP, 1).transpose(0, 1)
        scores = own @ key.transpose(1, 2) * 0.3
        scores.masked_fill_(~visible(span, pattern, span.kv_length), -torch.inf)
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


KINDS = {
    "one row each": [(5, (), 1), (21, (), 1), (31, (), 1), (12, (), 1)],
    "even blocks": [(31, (), 1), (31, (), 1), (47, (), 1)],
    "trees and rows": [(40, TREE, 1), (60, (), 1), (33, chain_parents(4), 1), (20, TREE[:2], 1)],
    "long beside short": [(300, TREE, 1), (20, (), 1), (310, (), 1), (25, TREE, 1), (290, (), 1)],
    "a prompt among them": [(0, (), 80), (50, TREE, 1), (16, (), 70), (18, (), 9), (64, (), 1)],
}


@pytest.mark.parametrize("pattern", [FULL, Pattern(window=24)], ids=["full", "window"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_piece(kind, scattered, pattern, monkeypatch):
    """With others' leavings that are not numbers wherever nothing was written."""
    monkeypatch.setattr(segments, "MAX_PADDED_KEYS", 256)
    generator = torch.Generator().manual_seed(0)
    feeds = feeds_of(KINDS[kind])
    cache = made(feeds, scattered, generator)
    batch = cache.batch_of(feeds)
    step = AttentionStep.of(batch, cache, (pattern,))
    total = len(batch.input_ids)
    query = torch.randn(1, KV_HEADS * GROUP, total, WIDTH, generator=generator)
    key = torch.randn(1, KV_HEADS, total, WIDTH, generator=generator)
    value = torch.randn(1, KV_HEADS, total, WIDTH, generator=generator)
    for _ in range(2):  # the second layer gathers into what the first one used
        out = paged_attention(query, key, value, 0, step, 0.3)[0]
        torch.testing.assert_close(
            out.double(), written_out(query, cache, step, pattern), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_8_bits(kind):
    """New keys and values are rounded before anybody reads them, the row itself too."""
    generator = torch.Generator().manual_seed(0)
    feeds = feeds_of(KINDS[kind])
    plain = made(feeds, True, generator)
    coded = copy.copy(plain)
    coded._layers = [tuple(encode(part) for part in plain.kv(0))]
    batch = coded.batch_of(feeds)
    shapes = [
        (1, heads, len(batch.input_ids), WIDTH) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    ]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    step = AttentionStep.of(batch, coded, (FULL,))
    out = paged_attention(query, key, value, 0, step, 0.3)[0]
    stored = decode(coded.kv(0)[0][batch.slots], torch.float32)
    assert torch.equal(stored, decode(encode(key[0].transpose(0, 1)), torch.float32))
    plain._layers = [tuple(decode(part, torch.float32) for part in coded.kv(0))]
    torch.testing.assert_close(
        out.double(), written_out(query, plain, step, FULL), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("width", [1, 6, 8, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_within_half_a_step(width, dtype):
    """And each head of each position alone has its scale; a head of zeros stays one."""
    numbers = torch.randn(5, 3, width).mul_(torch.logspace(-6, 6, 15).view(5, 3, 1)).to(dtype)
    numbers[2, 1] = 0
    entries = encode(numbers)
    assert entries.shape == (5, 3, width + 4) and entries.dtype == torch.int8
    assert torch.equal(entries[3:4, 1:2], encode(numbers[3:4, 1:2]))
    back = decode(entries.transpose(0, 1), torch.float32).transpose(0, 1)
    step = numbers.float().abs().amax(-1, keepdim=True) / 127
    assert ((back - numbers.float()).abs() <= 0.5001 * step).all()
    assert decode(entries, dtype).dtype == dtype


def test_what_is_not_finite_is_not_hidden():
    numbers = torch.ones(3, 8)
    numbers[0, 3], numbers[1, 5] = NAN, float("inf")
    back = decode(encode(numbers), torch.float32)
    assert back[:2].isnan().all() and back[2].isfinite().all()


def test_long_contexts_are_read_in_place():
    """No copies of a context for a step's sake, as long as its blocks lie in one run."""
    long = segments.MAX_PADDED_KEYS + 1
    feeds = feeds_of([(long, (), 1), (long + 40, TREE, 1), (50, (), 1), (60, (), 1)])
    cache = made(feeds, False, torch.Generator().manual_seed(0))
    step = AttentionStep.of(cache.batch_of(feeds), cache, (FULL,))
    segments_of_step = step.layouts[0].segments
    assert sorted((piece.batch, piece.gather is None) for piece in segments_of_step) == [
        (1, True),
        (1, True),
        (2, False),
    ]
