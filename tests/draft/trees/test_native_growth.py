"""Trees grown in one call of the kernels are those that grow level by level."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.batch import Slice
from paceline.core.draws import GREEDY_SHARPNESS
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceView
from paceline.core.tree import Draw, TokenTree, is_chain
from paceline.draft.selfspec import SelfDrafter
from paceline.draft.trees.grow import GrowingTree, grow
from paceline.draft.trees.levels import LevelDrafter
from paceline.draft.trees.policy import DynamicTree
from paceline.model.backends.base import EarlyStop, GrownTree, TreeRequest
from paceline.model.backends.native.handle import ModelHandle
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache
from support.engine_models import write_pair
from support.random_heads import write_eagle

PROMPTS = [[5, 9, 30, 41, 7], [3, 1, 4], [17] * 9 + [8], [60, 2, 77, 12]]
GREEDY = SamplingParams()
SPECS = (
    "model:{draft}",
    "model:{draft},nodes=9,width=3",
    "eagle:{eagle1}",
    "eagle2:{eagle1},nodes=7,width=2",
    "eagle3:{eagle3},nodes=12,width=4",
    "eagle3:{eagle3},nodes=32,width=8",
    "quantized:int8",
    "quantized:int8,nodes=9,width=3",
    "early_exit:layers=1",
    "layer_skip:skip=0",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("growth")
    target, draft = write_pair(Path(root))
    heads = {f"eagle{version}": write_eagle(Path(root), target, version) for version in (1, 3)}
    return {"target": target, "draft": draft, **heads}


class Watched:
    """Records the proposals for greedy requests, and counts the calls that grew them."""

    def __init__(self, patch: pytest.MonkeyPatch, at_once: bool) -> None:
        self.trees: list[TokenTree] = []
        self.calls = 0
        propose, call = LevelDrafter.propose, ModelHandle.grow

        def proposed(drafter: Any, plan: Any) -> list[TokenTree]:
            trees = propose(drafter, plan)
            self.trees += [tree for tree in trees if len(tree)]
            return trees

        def counted(handle: ModelHandle, *args: Any) -> Any:
            self.calls += 1
            return call(handle, *args)

        patch.setattr(LevelDrafter, "propose", proposed)
        patch.setattr(ModelHandle, "grow", counted)
        if not at_once:
            patch.setattr(LevelDrafter, "_grow_in_one_call", lambda *_: None)


@cache
def target_of(folder: str) -> LLM:
    return LLM(folder, "none", dtype="float32", backend="native")


def generate(
    folders: dict[str, str], spec: str, length: int, rule: str = "auto", **params: Any
) -> list[list[int]]:
    llm = target_of(folders["target"]).with_draft(
        spec.format(**folders), draft_length=length, max_batch_size=4, rule=rule
    )
    asked = [
        SamplingParams(**{"max_tokens": 12 + n, "ignore_eos": True, **params})
        for n in range(len(PROMPTS))
    ]
    done = llm.generate(PROMPTS, asked)
    check_cache(llm.engine.cache)
    check_cache(llm.engine.drafter.cache)  # type: ignore[attr-defined]
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_trees(folders: dict[str, str], spec: str, length: int) -> None:
    check_the_same_trees(folders, spec, length)


SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 0, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.3, "seed": 2**63 - 1, "min_p": 0.2, "top_k": 64},
)


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize(
    "spec", ["model:{draft}", "eagle3:{eagle3},nodes=12,width=4", "quantized:int8"]
)
def test_the_same_trees_of_seeded_requests(
    folders: dict[str, str], spec: str, params: dict[str, Any]
) -> None:
    check_the_same_trees(folders, spec, 4, **params)


def check_the_same_trees(folders: dict[str, str], spec: str, length: int, **params: Any) -> None:
    found = []
    for at_once in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LevelDrafter, "stops_early", False)
            watched = Watched(patch, at_once)
            texts = generate(folders, spec, length, **params)
            assert bool(watched.calls) is at_once
            found.append((texts, watched.trees))
    (texts, trees), (levels_texts, levels_trees) = found
    assert texts == levels_texts
    assert len(trees) > 10
    assert "nodes" in spec or all(is_chain(tree.parents) for tree in trees)
    same = [
        one.parents == other.parents and torch.equal(one.tokens, other.tokens)
        for one, other in zip(trees, levels_trees, strict=False)
    ]
    # The exponentials of the two differ in their last bits, which may turn a tie of two paths.
    assert sum(same) >= 0.95 * max(len(trees), len(levels_trees))


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7, "rule": "block"}, {"logit_bias": {5: 1.0}}]
)
def test_what_is_drawn_or_not_plain_grows_level_by_level(
    folders: dict[str, str], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, True)
    # Start-up may warm up what it likes.
    monkeypatch.setattr(LevelDrafter, "warm_up", lambda *_: None)
    generate(folders, "eagle3:{eagle3},nodes=12,width=4", 3, **params)
    assert watched.trees
    assert not watched.calls


def test_what_is_sampled_without_a_seed_is_given_one_where_that_is_cheaper(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its trees grow in one call; a second request of the same prompt has another text."""
    watched = Watched(monkeypatch, True)
    monkeypatch.setattr(LevelDrafter, "warm_up", lambda *_: None)
    texts = [
        generate(folders, "eagle3:{eagle3},nodes=12,width=4", 3, temperature=1.0) for _ in range(2)
    ]
    assert watched.calls and watched.trees
    assert texts[0] != texts[1]
    assert all(tree.draw is Draw.POINT for tree in watched.trees)
    watched.trees.clear()
    generate(folders, "model:{draft}", 3, temperature=1.0)
    assert all(tree.draw is Draw.IID for tree in watched.trees), "chains are drawn"


def test_no_tree_is_written_beyond_its_table(folders: dict[str, str]) -> None:
    model = CausalModel.load(folders["draft"], torch.float32, "cpu", backend="native")
    cache = PagedCache(model.cache_shapes, 2, 16, torch.float32, "cpu")
    cache.admit(0, ())
    cache.reserve(0, 16)
    growth = model.backend.tree_grower  # type: ignore[union-attr]
    logits = torch.zeros(1, model.vocab_size)
    (grown,) = growth(cache, [TreeRequest(3, 4, 6, 8, cache.blocks_of(0), GREEDY, 8)], logits)
    assert len(grown.tree) == 6
    with pytest.raises(IndexError, match="no room"):
        growth(cache, [TreeRequest(3, 4, 6, 9, cache.blocks_of(0), GREEDY, 8)], logits)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, seed=3)])
def test_a_chain_ends_behind_a_path_that_is_too_unlikely(
    folders: dict[str, str], params: SamplingParams
) -> None:
    """It is a prefix of the full chain, and ends nowhere else."""
    model = CausalModel.load(folders["target"], torch.float32, "cpu", backend="native")
    cache = PagedCache(model.cache_shapes, 4, 16, torch.float32, "cpu")
    cache.admit(0, ())
    cache.reserve(0, 32)
    logits = 3 * torch.randn(1, model.vocab_size, generator=torch.Generator().manual_seed(1))

    def chain(stop: float) -> GrownTree:
        cache.kv(0)[0].zero_(), cache.kv(0)[1].zero_(), cache.kv(1)[0].zero_()
        cache.kv(1)[1].zero_()
        wanted = TreeRequest(9, 1, 9, 8, cache.blocks_of(0), params, 8, EarlyStop(level_prob=stop))
        (grown,) = model.backend.tree_grower(cache, [wanted], logits)  # type: ignore[union-attr]
        return grown

    whole = chain(1e-30)
    likely = [math.exp(score) for score in whole.scores]
    assert len(likely) == 9 and likely == sorted(likely, reverse=True) and likely[0] < 1
    if params.greedy:
        first = (GREEDY_SHARPNESS * logits).softmax(-1).max()
        assert likely[0] == pytest.approx(float(first), rel=1e-4)
    for end in range(9):
        part = chain(likely[end] * 1.0001)
        assert len(part.tree) == end + 1
        assert torch.equal(part.tree.tokens, whole.tree.tokens[: end + 1])


@pytest.mark.parametrize(
    "early_stop",
    [EarlyStop(*p) for p in ((), (2.0, 0.0, 0.02), (2.0, 0.1), (0.5, 0.8, 0.12), (1, 9, 0.9))],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, seed=3)])
def test_trees_end_where_they_are_unlikely_as_level_by_level(
    folders: dict[str, str], params: SamplingParams, early_stop: EarlyStop
) -> None:
    model = CausalModel.load(folders["target"], torch.float32, "cpu", backend="native")
    cache = PagedCache(model.cache_shapes, 4, 16, torch.float32, "cpu")
    logits = 3 * torch.randn(1, model.vocab_size, generator=torch.Generator().manual_seed(1))
    seq, passes = SequenceView(0, [1] * 8, 8, params), 0
    cache.admit(0, ())
    cache.reserve(0, 64)
    for layer in range(2):
        cache.kv(layer)[0].zero_(), cache.kv(layer)[1].zero_()

    def forward(trees: list[GrowingTree]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return model(cache.batch_of([tree.frontier_span() for tree in trees]), cache).logits

    tree = DynamicTree(Slice(seq, 1, 5), 5, 3, 12, cache.device, 8, early_stop)
    (levels,) = grow([tree], logits, forward, None)
    wanted = TreeRequest(5, 3, 12, 8, cache.blocks_of(0), params, 8, early_stop)
    (at_once,) = model.backend.tree_grower(cache, [wanted], logits)  # type: ignore[union-attr]
    assert torch.equal(levels.tree.tokens, at_once.tree.tokens)
    assert levels.tree.parents == at_once.tree.parents and levels.slots == at_once.slots
    assert levels.scores == pytest.approx(at_once.scores, abs=1e-4 if params.greedy else 5e-3)
    chances = [math.exp(score) for score in levels.scores]
    assert len(chances) == 1 or min(chances) >= early_stop.node_prob
    assert (passes < 4) is (early_stop.level_prob > 0)
    assert len(chances) < 12 or not early_stop.node_prob


def test_a_draft_by_the_target_is_one_call(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first pass included."""
    watched, passes = Watched(monkeypatch, True), 0
    call = SelfDrafter._run_spans

    def counted(drafter: SelfDrafter, *args: Any) -> Any:
        nonlocal passes
        passes += 1
        return call(drafter, *args)

    monkeypatch.setattr(SelfDrafter, "_run_spans", counted)
    monkeypatch.setattr(LevelDrafter, "warm_up", lambda *_: None)
    for params in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0}):
        watched.calls = 0
        generate(folders, "quantized:int8", 5, **params)
        assert watched.calls and not passes


@pytest.mark.parametrize("narrow", [False, True])
def test_a_drawn_chain_is_drawn_from_its_q(folders: dict[str, str], narrow: bool) -> None:
    """And that is the model's distribution, truncated as asked for; tokens by their number."""
    model = CausalModel.load(folders["draft"], torch.float32, "cpu", backend="native")
    cache = PagedCache(model.cache_shapes, 4, 16, torch.float32, "cpu")
    cache.admit(0, ())
    cache.reserve(0, 32)
    params = SamplingParams(temperature=0.8, top_k=6, top_p=0.9)
    generator = torch.Generator().manual_seed(1)
    columns = model.vocab_size // 2 if narrow else model.vocab_size
    logits = 2 * torch.randn(1, columns, generator=generator)
    ids = torch.arange(columns) * 2 if narrow else None
    seen = Counter[int]()
    for drawn in torch.randint(1 << 62, (2000,), generator=generator).tolist():
        wanted = TreeRequest(3, 1, 3, 8, cache.blocks_of(0), params, 8, draw_seed=drawn)
        (grown,) = model.backend.tree_grower(cache, [wanted], logits, ids)  # type: ignore[union-attr]
        assert grown.tree.draw is Draw.IID and is_chain(grown.tree.parents)
        q, tokens = grown.tree.q, grown.tree.tokens
        assert q is not None and torch.all(q.gather(1, tokens.unsqueeze(1)) > 0)
        assert torch.allclose(q.sum(1), torch.ones(3), atol=1e-5)
        seen[int(tokens[0])] += 1
    view = SequenceView(0, [1], 1, params)
    expected = probabilities(logits, Rows((view,), (0,)))[0]
    found = q[0] if ids is None else q[0][ids]
    assert torch.allclose(found, expected, atol=1e-6)
    possible = [(int(column), share) for column, share in enumerate(expected.tolist()) if share]
    statistic = sum(
        (seen[column * 2 if narrow else column] - 2000 * share) ** 2 / (2000 * share)
        for column, share in possible
    )
    assert len(possible) > 2 and statistic < 30  # five degrees of freedom at most: once in 1e5
    again = [
        model.backend.tree_grower(cache, [wanted], logits, ids)[0]  # type: ignore[union-attr]
        for _ in range(2)
    ]
    assert torch.equal(again[0].tree.tokens, again[1].tree.tokens)


def test_growth_does_not_keep_a_model_alive(folders: dict[str, str]) -> None:
    """Weights are freed with their last reference, without the garbage collector."""
    model = CausalModel.load(folders["draft"], torch.float32, "cpu", backend="native")
    assert model.backend.name == "native" and model.backend.tree_grower is not None
    gone = weakref.ref(model.backend)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_row_that_is_no_distribution_has_no_candidates(folders: dict[str, str]) -> None:
    model = CausalModel.load(folders["draft"], torch.float32, "cpu", backend="native")
    cache = PagedCache(model.cache_shapes, 4, 16, torch.float32, "cpu")
    for seq_id in (0, 1):
        cache.admit(seq_id, ())
        cache.reserve(seq_id, 32)
    logits = torch.zeros(2, model.vocab_size)
    logits[0] = torch.nan
    for params in (GREEDY, SamplingParams(temperature=0.5, seed=1)):
        wanted = [TreeRequest(3, 2, 5, 8, cache.blocks_of(seq_id), params, 8) for seq_id in (0, 1)]
        none, some = model.backend.tree_grower(cache, wanted, logits)  # type: ignore[union-attr]
        assert len(none.tree) == 0
        assert len(some.tree) == 5
