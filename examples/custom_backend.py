"""A backend of one's own: the forward of Llama-shaped models in numpy, in float32.

A backend turns a packed batch over a paged cache into logits. Drafters, trees, heads, views that
skip layers, scheduling and the lossless rules need nothing else of it. Each row is computed alone,
so that its bits do not depend on what rides along.
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline import LLM, SamplingParams, register_backend
from paceline.core.batch import Batch, ModelOutput, Span
from paceline.model.backends.base import Backend, BackendModel
from paceline.model.paged.cache import PagedCache

Array = np.ndarray[Any, np.dtype[np.float32]]


def make(model: BackendModel) -> Backend | str:
    """The backend, or in a few words why it does not run this model."""
    if type(model.hf).__name__ != "LlamaForCausalLM":
        return f"{type(model.hf).__name__} is no Llama"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return "numpy computes in float32 on a processor"
    if not all(type(m) is torch.nn.Linear for m in model.hf.modules() if hasattr(m, "in_features")):
        return "its weights are no plain numbers"
    return NumpyLlama(model)


class NumpyLlama(Backend):
    """Llama by its formulas."""

    name = "numpy"
    runs_torch = False
    batch_invariant = True

    def __init__(self, model: BackendModel) -> None:
        config, base = model.hf.config, model.hf.model
        self._rope = base.rotary_emb
        self._heads, self._eps = config.num_attention_heads, config.rms_norm_eps
        self._embedding = _array(base.embed_tokens.weight)
        self._norm, self._head = _array(base.norm.weight), _array(model.hf.lm_head.weight)
        self._layers = [
            {name: _array(weight) for name, weight in layer.named_parameters()}
            for layer in base.layers
        ]
        self._skipped: frozenset[int] = frozenset()

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        ids = np.array(batch.input_ids)
        for first, tokens in batch.nodes:  # drafted tokens that lie in tensors
            ids[first : first + len(tokens)] = tokens.numpy()
        x = self._embedding[ids]
        cos, sin = (
            part[0].float().numpy()[:, None]
            for part in self._rope(torch.zeros(1), torch.tensor(batch.positions)[None])
        )
        slots, seen = np.array(batch.slots), list(_slots_seen(batch, cache.block_size))
        kept: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self._layers):
            if number in batch.features:
                kept[number] = torch.from_numpy(x.copy())
            if number in self._skipped:
                continue
            keys, values = (part.numpy() for part in cache.kv(number))
            normed = self._normed(x, layer["input_layernorm.weight"])
            query, key, value = (
                _product(layer[f"self_attn.{name}_proj.weight"], normed).reshape(
                    len(x), -1, cos.shape[-1]
                )
                for name in "qkv"
            )
            keys[slots], values[slots] = _rotated(key, cos, sin), value
            query = _rotated(query, cos, sin)
            attended = np.stack(
                [_attend(row, keys[at], values[at]) for row, at in zip(query, seen, strict=True)]
            )
            x = x + _product(layer["self_attn.o_proj.weight"], attended)
            normed = self._normed(x, layer["post_attention_layernorm.weight"])
            gate = _product(layer["mlp.gate_proj.weight"], normed)
            up = _product(layer["mlp.up_proj.weight"], normed)
            x = x + _product(layer["mlp.down_proj.weight"], gate / (1 + np.exp(-gate)) * up)
        last = self._normed(x, self._norm)
        if len(self._layers) in batch.features:
            kept[len(self._layers)] = torch.from_numpy(last)
        rows = slice(None) if batch.logit_rows is None else list(batch.logit_rows)
        return ModelOutput(torch.from_numpy(_product(self._head, last[rows])), kept)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = _product(self._head, hidden.reshape(-1, hidden.shape[-1]).numpy())
        return torch.from_numpy(rows).view(*hidden.shape[:-1], -1)

    def without_layers(self, skipped: frozenset[int]) -> Backend:
        other = copy.copy(self)
        other._skipped = skipped
        return other

    def _normed(self, x: Array, weight: Array) -> Array:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self._eps)) * weight


def _array(weight: torch.Tensor) -> Array:
    return weight.detach().numpy()


def _product(weight: Array, rows: Array) -> Array:
    """``rows [T, in]`` by ``weight [out, in]``, one row at a time."""
    return np.stack([weight @ row for row in rows]) if len(rows) else rows @ weight.T


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, -1)
    return x * cos + np.concatenate((-second, first), -1) * sin


def _attend(query: Array, keys: Array, values: Array) -> Array:
    """One row's ``query [heads, d]`` over its own ``keys, values [K, kv_heads, d]``: ``[heads *
    d]``."""
    groups = query.reshape(keys.shape[1], -1, query.shape[-1])
    scores = np.einsum("hgd,khd->hgk", groups, keys) / np.sqrt(np.float32(query.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hgk,khd->hgd", weights, values).reshape(-1)


def _slots_seen(batch: Batch, size: int) -> Iterator[list[int]]:
    """For each row the cache slots of the positions that it attends to, itself the last."""
    for span, table in zip(batch.spans, batch.tables, strict=True):
        slots = [table[i // size] * size + i % size for i in range(span.kv_length)]
        base = span.context + span.pending
        for row in range(span.pending):
            yield slots[: span.context + row + 1]
        matrix = span.ancestors  # of a tree that only tensors know
        for node in range(span.first_new, len(span.parents)):
            path = _path(span, node) if matrix is None else matrix[node].nonzero()[:, 0].tolist()
            yield [*slots[:base], *(slots[base + n] for n in path)]


def _path(span: Span, node: int) -> list[int]:
    """A node of the tree and its ancestors, from the root down."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = span.parents[node]
    return path


if __name__ == "__main__":
    register_backend("numpy", make)
    llm = LLM("paceline/tiny", draft="paceline/tiny-draft", backend="numpy", dtype="float32")
    (story,) = llm.generate("Once upon a time", SamplingParams(max_tokens=40, draft_length=4))
    print(story.text)
    print(f"on {llm.target.backend_reason}: {story.stats.accepted_tokens} drafts accepted")
