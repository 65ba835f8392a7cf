"""Random joins, steps with random trees, rollbacks, preemptions and leaves on the real cache.

After every step the integrity check runs, and the logits of what was computed are compared with a
fresh forward of the whole sequence: one wrong, stale or misplaced row shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline.model.paged.cache as cache_module
from paceline.core.batch import Span
from paceline.model.paged.blocks import BlockPool, OutOfBlocksError
from paceline.model.paged.cache import PagedCache, bytes_per_token, path_moves
from paceline.model.paged.states import StateStore
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache, check_pool
from support.engine_models import VOCAB, adapted, recurrent, reference_logits

MODEL = adapted()
MODELS = {"llama": MODEL} | {name: recurrent(name) for name in ("falcon_h1", "jamba", "qwen3_next")}
BLOCKS, SIZE = 24, 4
# Prompts begin alike, so that prefixes are shared.
STEM = [7, 3, 9, 11, 2, 5, 6, 1, 13, 17, 19, 23, 4]


@dataclass
class Live:
    tokens: list[int]
    cached: int


class World:
    """A model, a cache and some sequences, driven by a random source."""

    def __init__(self, model: CausalModel, rng: random.Random) -> None:
        self.model = model
        self.rng = rng
        self.cache = model.new_cache(BLOCKS, SIZE)
        self.live: dict[int, Live] = {}
        self.preempted: dict[int, Live] = {}
        self.next_id = 0
        self.worst = 0.0

    def join(self) -> None:
        if len(self.live) >= 4:
            return
        if self.preempted and self.rng.random() < 0.7:
            seq_id, seq = self.preempted.popitem()
        else:
            cut = self.rng.randint(0, len(STEM))
            tail = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 6))]
            seq_id, seq = self.next_id, Live(STEM[:cut] + tail, 0)
            self.next_id += 1
        seq.cached = self.cache.admit(seq_id, seq.tokens)
        assert seq.cached < len(seq.tokens)
        self.live[seq_id] = seq

    def leave(self) -> None:
        if self.live:
            seq_id = self.rng.choice(list(self.live))
            del self.live[seq_id]
            self.cache.free(seq_id)

    def preempt(self) -> None:
        if self.live:
            seq_id = self.rng.choice(list(self.live))
            self.preempted[seq_id] = self.live.pop(seq_id)
            self.cache.free(seq_id)

    def random_tree(self) -> tuple[int, ...]:
        size = self.rng.randint(0, 6)
        return tuple(self.rng.randint(-1, node - 1) for node in range(size))

    @torch.inference_mode()
    def step(self) -> None:
        """One packed forward of all live sequences: prefill chunks, plain steps and trees."""
        feeds: list[Span] = []
        chosen: list[tuple[int, tuple[int, ...], list[int], bool]] = []
        for seq_id, seq in list(self.live.items()):
            pending = seq.tokens[seq.cached :]
            feed = self.rng.randint(1, len(pending))
            decodes = feed == len(pending)
            parents = self.random_tree() if decodes else ()
            nodes = [self.rng.randrange(VOCAB) for _ in parents]
            try:
                self.cache.reserve(seq_id, seq.cached + feed + len(parents))
            except OutOfBlocksError:
                self.preempted[seq_id] = self.live.pop(seq_id)
                self.cache.free(seq_id)
                continue
            tokens = torch.tensor(nodes) if nodes else ()
            feeds.append(Span.of(seq_id, seq.cached, pending[:feed], parents, tokens))
            chosen.append((seq_id, parents, nodes, decodes))
        if not feeds:
            return
        logits = self.model(self.cache.batch_of(feeds), self.cache).logits
        row = 0
        moves: list[tuple[int, int, int]] = []
        after: list[tuple[int, int]] = []
        for feed, (seq_id, parents, nodes, decodes) in zip(feeds, chosen, strict=True):
            seq = self.live[seq_id]
            base = feed.context + feed.pending
            self.compare(logits[row], seq.tokens[:base])
            for node in range(len(parents)):
                self.compare(
                    logits[row + 1 + node], seq.tokens[:base] + path_to(node, parents, nodes)
                )
            row += 1 + len(parents)
            path = self.random_path(parents)
            moves.extend(cache_module.path_moves(seq_id, base, path))
            after.append((seq_id, base + len(path)))
            if decodes:
                seq.tokens += [nodes[node] for node in path] + [self.rng.randrange(VOCAB)]
        self.cache.move(moves)
        for seq_id, cached in after:
            self.live[seq_id].cached = cached
            self.cache.commit(seq_id, self.live[seq_id].tokens, cached)

    def random_path(self, parents: tuple[int, ...]) -> list[int]:
        path: list[int] = []
        here = -1
        while self.rng.random() < 0.8:
            children = [node for node, parent in enumerate(parents) if parent == here]
            if not children:
                break
            here = self.rng.choice(children)
            path.append(here)
        return path

    def compare(self, logits: torch.Tensor, tokens: list[int]) -> None:
        expected = reference_logits(self.model, tokens)[-1]
        self.worst = max(self.worst, float((logits.float() - expected).abs().max()))


def path_to(node: int, parents: tuple[int, ...], nodes: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = parents[node]
    return path


ACTIONS = st.lists(
    st.sampled_from(["join", "step", "step", "step", "leave", "preempt"]), min_size=6, max_size=24
)


def play(actions: list[str], seed: int, model: CausalModel = MODEL) -> World:
    world = World(model, random.Random(seed))
    for action in ["join", *actions]:
        getattr(world, action)()
        check_cache(world.cache)
    return world


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, seed=st.integers(0, 2**20))
def test_every_row_is_right_after_any_history(name: str, actions: list[str], seed: int) -> None:
    assert play(actions, seed, MODELS[name]).worst < 1e-3


def test_a_row_kept_for_a_rejected_node_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: accepted nodes of a tree are not moved, so rejected ones stay."""
    actions = ["join", "step", "step", "step", "step", "step"]
    assert max(play(actions, seed).worst for seed in range(6)) < 1e-3
    monkeypatch.setattr(cache_module, "path_moves", lambda seq_id, base, path: [])
    assert max(play(actions, seed).worst for seed in range(6)) > 1e-2


@pytest.mark.parametrize("planted", ["move", "commit"])
def test_a_state_of_a_rejected_node_is_caught(
    monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """The planted bugs: states are not moved along; the newest state is kept, not the accepted."""
    actions, model = ["join", "step", "step", "step", "step", "step"], MODELS["falcon_h1"]
    if planted == "move":
        monkeypatch.setattr(StateStore, planted, lambda *all: None)
    else:
        real = StateStore.commit

        def newest(store: StateStore, seq_id: int, length: int) -> None:
            slots = store._slots[seq_id]
            if slots:
                store.move([(seq_id, max(slots), length - 1)])
            real(store, seq_id, length)

        monkeypatch.setattr(StateStore, planted, newest)
    assert max(play(actions, seed, model).worst for seed in range(6)) > 1e-2


def test_moves_bring_a_path_behind_the_pending_tokens() -> None:
    assert path_moves(5, 10, [0, 1, 2]) == []
    assert path_moves(5, 10, [1, 4]) == [(5, 11, 10), (5, 14, 11)]


def test_moves_take_codes_with_their_scales() -> None:
    cache = PagedCache([(2, 6, 8)], 4, SIZE, torch.int8, "cpu")
    keys, values = cache.kv(0)
    assert keys.shape == (16, 2, 10) and values.shape == (16, 2, 12)
    assert bytes_per_token([(2, 6, 8)], torch.int8) == 2 * (10 + 12)
    for part in (keys, values):
        part.random_(-128, 128)
    cache.admit(0, STEM)
    cache.reserve(0, 12)
    before = [[part[cache._slot(0, index)].clone() for index in (9, 11)] for part in (keys, values)]
    cache.move([(0, 9, 2), (0, 11, 3)])
    after = [[part[cache._slot(0, index)] for index in (2, 3)] for part in (keys, values)]
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))


def test_prefix_blocks_are_shared_and_survive_their_first_owner() -> None:
    world = World(MODEL, random.Random(0))
    cache = world.cache
    tokens = [*STEM[:12], 1]
    assert cache.admit(0, tokens) == 0
    cache.reserve(0, 13)
    cache.commit(0, tokens, 13)
    assert cache.admit(1, tokens) == 12  # three whole blocks; the last token is computed again
    assert cache.admit(2, tokens[:12]) == 8  # never the whole prompt
    check_cache(cache)
    cache.free(0)
    cache.free(1)
    cache.free(2)
    assert cache.admit(3, tokens) == 12
    check_cache(cache)


def test_out_of_blocks_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.available == 1


def test_a_lone_sequence_grows_in_one_run() -> None:
    pool = BlockPool(32)
    blocks = pool.allocate(2)
    for _ in range(6):
        blocks += pool.allocate(1, blocks[-1])
    assert blocks == list(range(blocks[0], blocks[0] + 8))


def test_the_check_finds_a_leak() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    check_pool(pool, [table])
    with pytest.raises(AssertionError):
        check_pool(pool, [])
    with pytest.raises(AssertionError):
        check_pool(pool, [table, table])
