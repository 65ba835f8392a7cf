"""Random decoders of the kernels' architectures, wide enough for whole vectors and odd enough for
parts of them, and decoding one row at a time: the truth that every batch must repeat bit by bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.model.paged.int8 import cache_dtype
from paceline.model.probe import register
from paceline.model.target import CausalModel

VOCAB = 83
POSITIONS = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 6}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 70,
            "layer_types": LAYERS,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **{"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
            **{"mlp_only_layers": [0], "moe_intermediate_size": 88},
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            **{"logits_scaling": 6.0, "attention_multiplier": 0.25},
            **{"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 300, "layer_types": LAYERS}),
}


def native_model(
    shape: str, dtype: torch.dtype, kv_cache_dtype: str = "auto", backend: str = "native"
) -> CausalModel:
    register()
    kind, changes = SHAPES[shape]
    config = getattr(transformers, kind)(**{**COMMON, **changes})
    torch.manual_seed(1)
    hf: Any = AutoModelForCausalLM.from_config(config, attn_implementation="paceline")
    for parameter in hf.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model = CausalModel(hf.to(dtype), shape)
    assert model.use_backend(backend)
    model.cache_dtype = cache_dtype(kv_cache_dtype, dtype)
    return model


@dataclass
class Piece:
    """Rows of a sequence of the given tokens: some of them, then nodes of a tree behind."""

    tokens: Sequence[int]
    context: int
    parents: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


@dataclass
class Prefix:
    """What decoding gave after the tokens up to here, and the tokens that were tried next."""

    logits: torch.Tensor
    kept: list[torch.Tensor]  # the row's keys and values, layer by layer
    following: dict[int, Prefix] = field(default_factory=dict)


@dataclass
class Decoding:
    """Decodes one row at a time, alone, on one thread; remembers what each prefix gave."""

    model: CausalModel
    known: Prefix = field(default_factory=lambda: Prefix(torch.empty(0), []))
    cached: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        model = self.model
        self.cache = model.new_cache(POSITIONS // 16, 16)
        self.parts = [part for n in range(model.num_layers) for part in self.cache.kv(n)]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After the last of the tokens."""
        path: list[Prefix] = []
        at = self.known
        for token in tokens:
            if token not in at.following:
                return self._decode(path, tokens)
            at = at.following[token]
            path.append(at)
        return at.logits

    def _put_back(self, path: list[Prefix], tokens: Sequence[int]) -> None:
        """Into the cache, what the path kept and another path has overwritten there."""
        pairs = enumerate(zip(self.cached, tokens, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(self.cached), len(tokens)))
        if missing := [one.kept for one in path[same:]]:
            for part, rows in zip(self.parts, zip(*missing, strict=True), strict=True):
                part[same : len(path)] = torch.stack(rows)
        self.cached = list(tokens)

    def _decode(self, path: list[Prefix], tokens: Sequence[int]) -> torch.Tensor:
        self._put_back(path, tokens)
        at = path[-1] if path else self.known
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        table = tuple(range(len(tokens) // 16 + 1))
        for place in range(len(path), len(tokens)):
            one = [place]
            logits = self.model(
                Batch([tokens[place]], one, one, (Span(0, 0, place, 1),), (table,)), self.cache
            ).logits
            kept = [part[place].clone() for part in self.parts]
            at.following[tokens[place]] = Prefix(logits[0], kept)
            at = at.following[tokens[place]]
        torch.set_num_threads(threads)
        return at.logits


@dataclass
class Paged:
    """Several sequences in one cache, their blocks anywhere."""

    model: CausalModel
    rng: random.Random
    block_size: int
    sequences: int
    length: int
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        each = self.length // self.block_size + 1
        blocks = list(range(each * self.sequences))
        self.rng.shuffle(blocks)
        self.tables = [blocks[i * each : (i + 1) * each] for i in range(self.sequences)]
        self.cache = self.model.new_cache(len(blocks), self.block_size)

    def slot(self, seq: int, index: int) -> int:
        return (
            self.tables[seq][index // self.block_size] * self.block_size + index % self.block_size
        )

    def run(self, pieces: dict[int, Piece], features: Sequence[int] = ()) -> ModelOutput:
        """One forward over a piece of each named sequence, in the order given."""
        spans, ids, slots = [], list[int](), list[int]()
        for seq, piece in pieces.items():
            pending = len(piece.tokens) - piece.context
            span = Span(seq, len(ids), piece.context, pending, piece.parents)
            ids += [*piece.tokens[piece.context :], *piece.nodes]
            slots += [self.slot(seq, index) for index in span.indices]
            spans.append(span)
        positions = list(itertools.chain.from_iterable(span.positions for span in spans))
        batch = Batch(
            ids,
            positions,
            slots,
            tuple(spans),
            tuple(tuple(self.tables[seq]) for seq in pieces),
            features=features,
        )
        with torch.inference_mode():
            return self.model(batch, self.cache)


def paths(piece: Piece) -> list[list[int]]:
    """The tokens that each row of a piece stands behind, itself included."""
    texts = [list(piece.tokens[: at + 1]) for at in range(piece.context, len(piece.tokens))]
    for node in range(len(piece.parents)):
        path: list[int] = []
        at = node
        while at >= 0:
            path.insert(0, piece.nodes[at])
            at = piece.parents[at]
        texts.append([*piece.tokens, *path])
    return texts
