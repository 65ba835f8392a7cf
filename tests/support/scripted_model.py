"""A model whose forward costs next to nothing and shows every wrong row, slot, state and adapter.

A row's logits depend on its own token and on a hash of all that it sees: the keys of its context
and its ancestors, in their order, and the state before it. All numbers are whole and small, so
that sums are exact in any order. It runs on the shell of a tiny Llama, whose embedding and head
are the numbers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import LLM
from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.tree import parents_of
from paceline.model.backends.base import Backend, BackendModel, register_backend
from paceline.model.paged.cache import PagedCache
from support.engine_models import random_llama
from support.tiny_models import SENTENCES

PRIME, LIVELY = 65_521, 14  # tokens that are likely
_WEIGHTS = np.random.default_rng(1).integers(1, PRIME, 4096)  # by position
_NOISE = np.random.default_rng(2).integers(-3, 4, (2, 61, 32)).astype(np.float32)


def write_scripted(root: Path) -> tuple[str, str]:
    """Folders of a target and of a draft that is often right, with a shared tokenizer."""
    from embedded_target import train_tokenizer

    tokenizer = train_tokenizer(SENTENCES, 320)
    size = len(tokenizer)
    folders = []
    for name, wrong in (("target", 0), ("draft", 2)):
        numbers, more = np.random.default_rng(3), np.random.default_rng(4)
        rows = numbers.integers(-8, 9, (2, size, 32)) + wrong * more.integers(-1, 2, (2, size, 32))
        rows[0, :, 0] = 8  # by the head's first column some tokens are far likelier
        rows[1, :, 0] = -60
        rows[1, numbers.permutation(size)[:LIVELY], 0] = 30
        model = random_llama(3, 2, 0.0, size)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(torch.from_numpy(rows[0]))
            model.get_output_embeddings().weight.copy_(torch.from_numpy(rows[1]))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        folders.append(str(root / name))
    return folders[0], folders[1]


def scripted(folder: str, recurrent: bool = False) -> LLM:
    """The target, decoding plainly; ``recurrent``: its second layer has states, not keys."""
    register_backend("scripted", Scripted)
    llm = LLM(folder, "none", backend="scripted", dtype="float32", max_batch_size=1)
    if recurrent:
        shell = llm.target.reference
        shell.states, shell.shapes = [[], [((1,), torch.int64)]], [shell.shapes[0], (0, 0, 0)]
        llm = llm.with_draft("none", max_batch_size=1)
    return llm


class Scripted(Backend):
    """Two layers, each of which adds a row of noise that its hash chooses."""

    name = "scripted"
    runs_torch = False
    batch_invariant = True

    def __init__(self, model: BackendModel) -> None:
        inputs, outputs = (model.embedding(side).weight for side in ("input", "output"))
        self._inputs = inputs.float().round().numpy()
        self._outputs = outputs.float().round().numpy()
        self._skipped: frozenset[int] = frozenset()

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:  # type: ignore[override]
        ids = np.array(batch.input_ids)
        for first, tokens in batch.nodes:  # drafted tokens that lie in tensors
            ids[first : first + len(tokens)] = tokens.numpy()
        slots, x, seen = np.array(batch.slots), self._inputs[ids], ids + 1
        kept = {}
        for layer, noise in enumerate(_NOISE):
            if layer in batch.features:
                kept[layer] = torch.from_numpy(x.copy())
            if layer in self._skipped:
                continue
            if cache.states is not None and layer:
                hashes = _advanced(batch, cache, seen)
            else:
                keys = cache.kv(layer)[0][:, 0, 0].numpy()
                keys[slots] = seen
                hashes = np.concatenate([_hashes(*pair, keys, cache) for pair in _pairs(batch)])
            x = x + noise[hashes % len(noise)]
            seen = hashes
        if len(_NOISE) in batch.features:
            kept[len(_NOISE)] = torch.from_numpy(x)
        rows = x if batch.logit_rows is None else x[list(batch.logit_rows)]
        return ModelOutput(torch.from_numpy(self._product(rows)), kept)

    def _product(self, rows: Any) -> Any:
        return rows @ self._outputs.T / 32

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._product(hidden.numpy()))

    def without_layers(self, skipped: frozenset[int]) -> Backend:
        other = copy.copy(self)
        other._skipped = skipped
        return other

    def check_adapter(self, adapter: Any) -> None:
        """All are run."""


def _pairs(batch: Batch) -> list[tuple[Span, tuple[int, ...]]]:
    return list(zip(batch.spans, batch.tables, strict=True))


def _parents(span: Span) -> tuple[int, ...]:
    return span.parents if span.ancestors is None else parents_of(span.ancestors)


def _hashes(span: Span, table: tuple[int, ...], keys: Any, cache: PagedCache) -> Any:
    """Of a span's rows, from the ``keys`` that each of them sees."""
    size, base, parents = cache.block_size, span.context + span.pending, _parents(span)
    blocks = np.array(table)[: -(-span.kv_length // size)]
    slots = (blocks[:, None] * size + np.arange(size)).ravel()[: span.kv_length]
    read = keys[slots].astype(np.int64)
    if span.adapter is not None:
        read += span.adapter.number
    sums = np.cumsum(read[:base] * _WEIGHTS[:base])
    nodes: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depth = base if parent < 0 else depths[parent] + 1
        before = int(sums[-1]) if parent < 0 else nodes[parent]
        depths.append(depth)
        nodes.append(before + int(read[base + node] * _WEIGHTS[depth]))
    return np.array([*sums[span.context :], *nodes[span.first_new :]], np.int64) % PRIME


def _advanced(batch: Batch, cache: PagedCache, seen: Any) -> Any:
    """The states behind all rows, from those before them."""
    assert cache.states is not None
    step = cache.states.route(batch, cache.block_size)
    states = cache.states.layer(1)[0][:, 0].numpy()
    made = np.zeros(len(seen), np.int64)
    adapters = np.repeat(
        [span.adapter.number if span.adapter else 0 for span in batch.spans],
        [span.rows for span in batch.spans],
    )
    for first, end, before, behind in step.chunks:
        state = int(states[before])
        for row in range(first, end):
            state = made[row] = (31 * state + seen[row] + adapters[row] + 1) % PRIME
        states[behind] = state
    for level in step.levels:
        rows = level.rows.numpy()
        made[rows] = (31 * states[level.before] + seen[rows] + adapters[rows] + 1) % PRIME
        states[level.after] = made[rows]
    return made
