"""Heads on the native kernels compute what the modules do; a row's bits depend on that row only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.batch import Span
from paceline.draft.heads.block import _block_mask
from paceline.draft.heads.block_head import BlockConfig, BlockHead
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead
from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, save_medusa
from paceline.draft.spec import LoadContext
from paceline.drafters import parse_draft
from paceline.kernels.library import SAME_BITS, choose, instructions
from paceline.model.backends.base import BlockStep, EagleStep
from paceline.model.backends.native.heads import NativeBlock, NativeEagle, NativeMedusa
from paceline.model.backends.native.model import NativeModel
from paceline.model.paged.cache import PagedCache
from paceline.model.precision import quantise_loaded
from paceline.model.quantised.weights import LinearBase
from paceline.model.target import CausalModel
from support.engine_models import VOCAB, random_llama
from support.every_drafter import SPECS
from support.heard_stages import heard
from support.random_heads import eagle_config, expanded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDER = {"hidden_size": 72, "heads": 3, "kv_heads": 1, "head_dim": 24, "has_embedding": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {"version": 1},
    "eagle, bias": {"version": 1, "fc_bias": True},
    "eagle3": {},
    "eagle3, normed residual": {"norm_before_residual": True},
    "eagle3, bias": {"attention_bias": True, "fc_bias": True},
    "eagle3, scaled": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "eagle3, odd sizes": {**WIDER, "ffn_size": 104},
    "eagle3, two layers": {"layers": 2},
    "eagle3, the target's head": {"has_lm_head": False, "draft_vocab_size": VOCAB},
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Run on one of the instruction sets with equal bits, whichever PACELINE_NATIVE names."""
    name, threads = instructions(), torch.get_num_threads()
    next(filter(choose, SAME_BITS))
    yield
    choose(name)
    torch.set_num_threads(threads)


def target_of(dtype: torch.dtype, quantize: str | None = None) -> CausalModel:
    hf = random_llama().to(dtype)
    if quantize:
        quantise_loaded("random", hf, quantize)
    return CausalModel(hf, "random")


def random_eagle(target: CausalModel, changes: dict[str, Any]) -> EagleHead:
    first = changes.get("version") == 1
    sizes = {
        "vocab_size": VOCAB,
        "target_hidden_size": 32,
        "target_layers": target.num_layers,
        "feature_layers": (target.num_layers,) if first else (0, 1, 2),
        "draft_vocab_size": VOCAB if first else 40,
        "max_positions": 640,
    }
    config: EagleConfig = eagle_config(**{**sizes, **changes})
    ids = None
    if config.version == 3:
        ids = list(range(3, 43)) if config.draft_vocab_size == 40 else list(range(VOCAB))
    torch.manual_seed(0)
    head = EagleHead(config, ids, target.hf.get_output_embeddings()).eval().requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return head.to(target.dtype)


@dataclass
class Texts:
    """Two sequences of tokens and features, and after each a tree with hidden states."""

    tokens: list[list[int]]
    features: list[torch.Tensor]
    parents: list[tuple[int, ...]]
    nodes: list[torch.Tensor]
    hidden: list[torch.Tensor]

    @classmethod
    def of(cls, config: EagleConfig, dtype: torch.dtype, length: int) -> Texts:
        rng = random.Random(3)
        torch.manual_seed(1)
        width = config.target_hidden_size * len(config.feature_layers)
        lengths = [length, length // 2 + 1]
        return cls(
            [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths],
            [torch.randn(n, width).to(dtype) for n in lengths],
            [(-1, -1, 0, 0, 1, 2), (-1, 0, 1, 2, 3, 4)],
            [torch.tensor([rng.randrange(VOCAB) for _ in range(6)]) for _ in lengths],
            [torch.randn(6, config.hidden_size).to(dtype) for _ in lengths],
        )


Found = list[dict[Any, tuple[torch.Tensor, torch.Tensor]]]


def run(step: EagleStep, texts: Texts, dtype: torch.dtype, chunk: int) -> Found:
    """Outputs and logits of every row of both sequences, by index or path; ``chunk`` rows a step
    of both together. The trees come in two levels."""
    found: Found = [{}, {}]
    cache = PagedCache(step.head.config.cache_shapes, 80, 16, dtype, "cpu")
    for seq, tokens in enumerate(texts.tokens):
        cache.admit(seq, ())
        cache.reserve(seq, len(tokens) + 6)

    def take(feeds: list[Span], keys: list[Any], hidden: list[torch.Tensor], fused: bool) -> None:
        outputs, logits = step(cache.batch_of(feeds), cache, torch.cat(hidden), fused)
        for (seq, key), *row in zip(keys, outputs, logits, strict=True):
            found[seq][key] = (row[0], row[1])

    for at in range(0, max(map(len, texts.tokens)), chunk):
        parts = [(seq, tokens[at : at + chunk]) for seq, tokens in enumerate(texts.tokens)]
        parts = [(seq, part) for seq, part in parts if part]
        take(
            [replace(Span.of(seq, at, part), scored=len(part) - 1) for seq, part in parts],
            [(seq, at + i) for seq, part in parts for i in range(len(part))],
            [texts.features[seq][at : at + len(part)] for seq, part in parts],
            False,
        )
    for first, end in ((0, 2), (2, 6)):
        bases = [len(tokens) for tokens in texts.tokens]
        take(
            [
                Span.of(seq, base, (), texts.parents[seq][:end], texts.nodes[seq][first:end], first)
                for seq, base in enumerate(bases)
            ],
            [(seq, f"node {node}") for seq in (0, 1) for node in range(first, end)],
            [texts.hidden[seq][first:end] for seq in (0, 1)],
            True,
        )
    return found


def alone(step: EagleStep, texts: Texts, dtype: torch.dtype) -> Found:
    """The same with one row per step; a node follows its ancestors as in a chain."""
    found: Found = [{}, {}]
    torch.set_num_threads(1)
    for seq, tokens in enumerate(texts.tokens):
        cache = PagedCache(step.head.config.cache_shapes, 40, 16, dtype, "cpu")
        cache.admit(0, ())
        cache.reserve(0, len(tokens) + 6)
        for at, token in enumerate(tokens):
            batch = cache.batch_of([Span.of(0, at, (token,))])
            out = step(batch, cache, texts.features[seq][at : at + 1], False)
            found[seq][at] = (out[0][0], out[1][0])
        for node in range(6):
            path = [node]
            while texts.parents[seq][path[0]] >= 0:
                path.insert(0, texts.parents[seq][path[0]])
            for depth, each in enumerate(path):
                feed = Span.of(0, len(tokens) + depth, (int(texts.nodes[seq][each]),))
                hidden = texts.hidden[seq][each : each + 1]
                out = step(cache.batch_of([feed]), cache, hidden, True)
            found[seq][f"node {node}"] = (out[0][0], out[1][0])
    return found


def close(got: torch.Tensor, wanted: torch.Tensor, few: float = 0.05) -> None:
    """To 1e-4 in float32; in bf16, where rounding is elsewhere, ``few`` of a row's norm."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        wide, want = got.float(), wanted.float()
        assert (wide - want).norm() <= few * want.norm()


def same(found: Found, wanted: Found, compare: Callable[..., Any] = torch.equal) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.keys() == want.keys()
        for key in want:
            for a, b in zip(got[key], want[key], strict=True):
                assert compare(a, b) is not False, key


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", list(VARIANTS))
@torch.inference_mode()
def test_the_modules_own_results(variant: str, dtype: str) -> None:
    kind = DTYPES[dtype]
    target = target_of(kind)
    head = random_eagle(target, VARIANTS[variant])
    texts = Texts.of(head.config, kind, 40)
    plain = EagleStep(head, head.embed_tokens or target.hf.get_input_embeddings())
    wanted = run(plain, texts, kind, 9)
    full = expanded(head, wanted[0][0][1][None])
    assert target.use_backend("native")
    step = target.backend.eagle(head, target)
    assert isinstance(step, NativeEagle)
    found = run(step, texts, kind, 9)
    same(found, wanted, close)
    got = expanded(step.head, found[0][0][1][None])
    assert torch.equal(got.isneginf(), full.isneginf()) and got.shape == (1, VOCAB)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3, odd sizes"])
@torch.inference_mode()
def test_bits_are_a_rows_own(variant: str, dtype: str) -> None:
    """A row has the same bits with any chunks, neighbours, trees, threads and instruction set."""
    kind = DTYPES[dtype]
    target = target_of(kind)
    head = random_eagle(target, VARIANTS[variant])
    assert target.use_backend("native")
    step = target.backend.eagle(head, target)
    texts = Texts.of(head.config, kind, 270)  # two blocks of keys
    wanted = alone(step, texts, kind)
    for threads, chunk in ((1, 300), (3, 300), (2, 7)):
        torch.set_num_threads(threads)
        same(run(step, texts, kind, chunk), wanted)
    torch.set_num_threads(1)
    for _ in filter(choose, SAME_BITS):
        same(run(step, texts, kind, 64), wanted)


BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "causal": {"causal": True},
    "bias": {"attention_bias": True},
    "odd sizes": {"heads": 2, "kv_heads": 1, "head_dim": 24, "ffn_size": 104, "layers": 1},
    "own embedding": {"has_embedding": True, "has_lm_head": True},
}


def random_block(target: CausalModel, changes: dict[str, Any]) -> BlockHead:
    sizes = {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    known = {"vocab_size": VOCAB, "target_layers": target.num_layers, "feature_layers": (0, 2)}
    block = {"layers": 2, "block_size": 5, "mask_token": 96, "max_positions": 640}
    head = BlockHead(BlockConfig(**{**sizes, **known, **block, **changes}))
    torch.manual_seed(0)
    for parameter in head.requires_grad_(False).parameters():
        noise = torch.randn_like(parameter) * 0.3
        parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
    return head.to(target.dtype)


def block_outputs(
    step: BlockStep, dtype: torch.dtype, chunk: int, seqs: Sequence[int] = (0, 1)
) -> list[torch.Tensor]:
    """The outputs of a block of each sequence, whose context was written ``chunk`` rows a step."""
    config = step.head.config
    cache, lengths = PagedCache(config.cache_shapes, 80, 16, dtype, "cpu"), (270, 19)
    torch.manual_seed(1)
    features = [torch.randn(n, 64).to(dtype) for n in lengths]
    for seq in seqs:
        cache.admit(seq, ())
        cache.reserve(seq, lengths[seq] + config.block_size)
    for at in range(0, max(lengths[seq] for seq in seqs), chunk):
        parts = [(seq, features[seq][at : at + chunk]) for seq in seqs if at < lengths[seq]]
        spans = [Span.of(seq, at, [3] * len(part)) for seq, part in parts]
        step.write_context(cache.batch_of(spans), cache, torch.cat([part for _, part in parts]))
    parents, mask = _block_mask(config.block_size, config.causal, torch.device("cpu"))
    tokens = [96] * (config.block_size - 1)
    blocks = [Span.of(n, lengths[n], (), parents, [n + 7, *tokens], ancestors=mask) for n in seqs]
    return list(step(cache.batch_of(blocks), cache).split(config.block_size))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", list(BLOCKS))
@torch.inference_mode()
def test_blocks(kind: str, dtype: str) -> None:
    """The modules' results; the same bits with any chunks, neighbours, threads and instructions."""
    target = target_of(DTYPES[dtype])
    head = random_block(target, BLOCKS[kind])
    embed = head.embed_tokens or target.hf.get_input_embeddings()
    wanted = block_outputs(BlockStep(head, embed, target.head), target.dtype, 50)
    assert target.use_backend("native")
    step = target.backend.block(head, target)
    assert isinstance(step, NativeBlock)
    torch.set_num_threads(1)
    found = block_outputs(step, target.dtype, 300)
    for got, want in zip(found, wanted, strict=True):
        close(got, want)
        logits = head.lm_head or target.head
        assert torch.equal(step.logits(got), logits(got)) and step.logits(got).shape == (5, VOCAB)
    for _ in filter(choose, SAME_BITS):
        for threads, chunk in ((1, 64), (3, 7)):
            torch.set_num_threads(threads)
            same_bits = zip(block_outputs(step, target.dtype, chunk), found, strict=True)
            assert all(torch.equal(*pair) for pair in same_bits)
        assert torch.equal(block_outputs(step, target.dtype, 20, [1])[0], found[1])


MEDUSA: dict[str, dict[str, Any]] = {
    "own": {},
    "shared": {"shared_head": True},
    "no blocks": {"layers": 0},
    "shared, no blocks": {"layers": 0, "shared_head": True},
    "plain blocks": {"layers": 2, "bias": False},
    "reduced": {"draft_vocab_size": 30},
    "shared, reduced": {"draft_vocab_size": 30, "shared_head": True, "layers": 2},
}


def random_medusa(target: CausalModel, changes: dict[str, Any]) -> MedusaHeads:
    config = MedusaConfig(hidden_size=32, vocab_size=VOCAB, heads=3)
    heads = MedusaHeads(replace(config, **changes)).requires_grad_(False)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    return heads.to(target.dtype)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", list(MEDUSA))
@torch.inference_mode()
def test_medusa_heads(kind: str, dtype: str, quantize: str | None) -> None:
    """The modules' results; of a row the same bits in every batch, on any number of threads."""
    target = target_of(DTYPES[dtype], quantize)
    heads = random_medusa(target, MEDUSA[kind])
    assert target.use_backend("native")
    torch.manual_seed(1)
    features = torch.randn(5, 32).to(target.dtype)
    wanted = [heads.logits(head, features, target.head) for head in range(3)]
    quick = target.backend.medusa(heads)
    assert isinstance(quick, NativeMedusa)
    limits = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 0.1}
    if quantize and MEDUSA[kind].get("shared_head"):  # what is rounded otherwise turns a code
        limits = {"rtol": 0.1, "atol": 0.2}
    for count in (1, 3):
        torch.testing.assert_close(quick(features, count), torch.stack(wanted[:count], 1), **limits)
    rows = torch.cat([quick(row[None], 3) for row in features])
    for name in filter(choose, SAME_BITS):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(quick(features, 3), rows), name
            assert torch.equal(quick(features[1:3], 2), rows[1:3, :2]), name


def test_eight_bits_where_the_kernels_run_heads_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[Any] = []
    for name in ("eagle", "block", "medusa", "packed"):
        run = getattr(NativeModel, name)
        notes = lambda self, head, *rest, run=run: heads.append(head) or run(self, head, *rest)  # noqa: E731
        monkeypatch.setattr(NativeModel, name, notes)
    for dtype in DTYPES:
        target = CausalModel.load("paceline/tiny", dtype, "cpu", backend="native")
        loading = LoadContext(target, None, dtype)  # type: ignore[arg-type]
        config = MedusaConfig(target.hidden_size, target.vocab_size, heads=2)
        save_medusa(MedusaHeads(config), tmp_path / "own")
        specs = [SPECS[kind] for kind in ("eagle", "eagle3, one pass", "dflash", "dspark", "mtp")]
        shared = SPECS["medusa"]  # their blocks alone would gain too little
        for spec in (*specs, f"medusa:{tmp_path / 'own'}", shared):
            for option in ("", ",quantize=none"):
                heads.clear()
                parse_draft(spec + option).prepare(loading)
                layers = [m for m in heads[-1].modules() if isinstance(m, LinearBase)]
                bits = 32 if dtype == "float32" else 16 if option or spec == shared else 8
                assert {m.matrix_size().bits for m in layers} == {bits}, (spec, dtype, option)


def test_on_the_reference_backend() -> None:
    target = target_of(torch.float32)
    assert type(target.backend.eagle(random_eagle(target, {}), target)) is EagleStep
    assert type(target.backend.block(random_block(target, {}), target)) is BlockStep
    assert not isinstance(target.backend.medusa(random_medusa(target, {})), NativeMedusa)


def test_angles_that_depend_on_the_length(said: list[str]) -> None:
    target = target_of(torch.float32)
    assert target.use_backend("native")
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    head = random_eagle(target, {"rope_scaling": scaling})
    assert type(target.backend.eagle(head, target)) is EagleStep
    assert said == [
        "the EAGLE head runs on the reference backend: "
        "the rotary embedding dynamic depends on the length"
    ]


@pytest.fixture
def said() -> Iterator[list[str]]:
    with heard() as listener:
        yield listener.lines
