"""Grown trees equal straightforward references over a table of logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batch import Slice
from paceline.core.draws import GREEDY_SHARPNESS, top_candidates
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree
from paceline.draft.trees.grow import GrowingTree, ReducedLogits, StaticTree, grow, tree_candidates
from paceline.draft.trees.policy import DynamicTree
from paceline.draft.trees.shape import Shape
from paceline.verify.verifier import Verifier
from support.spans import judged

VOCAB = 11
CPU = torch.device("cpu")
Path = tuple[int, ...]
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "seeded": SamplingParams(temperature=0.8, seed=5),
    "penalised": SamplingParams(temperature=0.9, seed=6, presence_penalty=2.0),
}


def request(params: SamplingParams, seq_id: int = 0) -> SequenceState:
    return SequenceState(seq_id, [1, 2, 3 + seq_id], 2, params)


class Table:
    """A drafter's model: random logits after every string, and what it expanded."""

    def __init__(self, seed: int = 0, scale: float = 1.5) -> None:
        self.seed, self.scale = seed, scale
        self.expanded: dict[int, list[Path]] = {}

    def after(self, seq: SequenceState, path: Sequence[int]) -> torch.Tensor:
        key = 0
        for token in (seq.seq_id, *path):
            key = key * 31 + token + 1
        generator = torch.Generator().manual_seed(self.seed * 7919 + key)
        return torch.randn(VOCAB, generator=generator) * self.scale

    def grow(
        self, trees: list[GrowingTree], seed: int = 0
    ) -> list[tuple[TokenTree, tuple[int, ...]]]:
        """All trees grown together, with nothing but what a drafter is given."""

        def forward(growing: list[GrowingTree]) -> torch.Tensor:
            rows = []
            for tree in growing:
                own = self.expanded.setdefault(tree.item.seq.seq_id, [])
                for token in tree.frontier.tolist():
                    parent = tree.expanded_parents[len(own)]
                    if tree.ancestors is not None:  # the parents say no more than depths
                        above = tree.ancestors[len(own)].nonzero().flatten().tolist()
                        assert above.pop() == len(own)
                        assert len(above) == (len(own[parent]) if parent >= 0 else 0)
                        parent = above[-1] if above else -1
                    own.append((*(own[parent] if parent >= 0 else ()), token))
                    rows.append(self.after(tree.item.seq, own[-1]))
                assert len(own) == len(tree.expanded_parents)
            return torch.stack(rows)

        self.expanded.clear()
        first = torch.stack([self.after(tree.item.seq, ()) for tree in trees])
        grown = grow(trees, first, forward, torch.Generator().manual_seed(seed))
        return [(done.tree, done.slots) for done in grown]

    def distribution(self, seq: SequenceState, path: Path) -> torch.Tensor:
        """float32 [V]: the drafter's distribution after a string, for this request."""
        rows = Rows((seq,), (len(path),), torch.tensor([path], dtype=torch.int64))
        return probabilities(self.after(seq, path)[None], rows)[0]


def strings(tree: TokenTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def check_slots(tree: TokenTree, slots: tuple[int, ...], expanded: list[Path]) -> None:
    """Slots are each node's index among the expanded nodes; inner nodes have one."""
    paths = strings(tree)
    assert len(slots) == len(paths)
    for node, (path, slot) in enumerate(zip(paths, slots, strict=True)):
        assert slot == (expanded.index(path) if path in expanded else -1)
        assert slot >= 0 or node not in tree.parents


# --- dynamic -------------------------------------------------------------------------------------


def scores_by_hand(table: Table, seq: SequenceState, depth: int, width: int) -> dict[Path, float]:
    """Log-probability of every candidate: each level expands the ``width`` likeliest."""
    scores: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        found: dict[Path, float] = {}
        for path, score in level.items():
            logits = table.after(seq, path)[None]
            rows = Rows((seq,), (len(path),), torch.tensor([path], dtype=torch.int64))
            if seq.params.greedy:
                weights = torch.log_softmax(GREEDY_SHARPNESS * logits, -1)[0]
            else:
                weights = probabilities(logits, rows)[0].log()
            if seq.params.seed is not None:
                noise = gumbel([seq.params.seed], rows.positions, VOCAB)[0]
                weights = torch.log_softmax(weights + noise, -1)
            for token in weights.topk(width).indices.tolist():
                found[(*path, token)] = score + float(weights[token])
        scores |= found
        level = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
    return scores


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalised"])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 3, 2), (2, 3, 5), (3, 2, 6), (4, 3, 30)])
def test_dynamic_keeps_exactly_the_likeliest(kind: str, depth: int, width: int, nodes: int) -> None:
    for seed in range(5):
        table, seq = Table(seed), request(KINDS[kind])
        tree, slots = table.grow([DynamicTree(Slice(seq, 1, depth), depth, width, nodes, CPU)])[0]
        scores = scores_by_hand(table, seq, depth, width)
        expected = sorted(scores, key=lambda path: -scores[path])[:nodes]
        assert set(strings(tree)) == set(expected) and len(tree) == len(expected)
        assert tree.draw is Draw.POINT
        check_slots(tree, slots, table.expanded.get(0, []))


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_with_full_width_it_is_the_best_of_all_connected_trees(seed: int, nodes: int) -> None:
    """Brute force over every string: no other connected set of as many nodes is likelier."""
    vocab, table, seq = 3, Table(seed), request(KINDS["greedy"])
    table.after = lambda seq, path, of=table.after: of(seq, path)[:vocab]  # type: ignore[method-assign]
    (tree, _), *_ = table.grow([DynamicTree(Slice(seq, 1, 2), 2, vocab, nodes, CPU)])
    chance: dict[Path, float] = {(): 1.0}
    for path in itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=n) for n in (1, 2)
    ):
        distribution = torch.softmax(GREEDY_SHARPNESS * table.after(seq, path[:-1]), -1)
        chance[path] = chance[path[:-1]] * float(distribution[path[-1]])
    del chance[()]
    # Products fall along paths, so the likeliest nodes are connected and nothing can beat them.
    best = sum(sorted(chance.values(), reverse=True)[:nodes])
    assert sum(chance[path] for path in strings(tree)) == pytest.approx(best, rel=1e-5)
    assert len(tree) == min(nodes, len(chance))


# --- static --------------------------------------------------------------------------------------

SHAPES = {
    "chain": Shape.branching((1, 1, 1)),
    "tree": Shape.branching((3, 2, 1)),
    "sparse": Shape.of_paths([(0, 0, 0), (0, 1), (1, 0), (2,)]),
    "holes": Shape.of_paths([(0, 2), (3, 1, 0)]),  # deterministic requests only
}


def ranked_by_hand(table: Table, seq: SequenceState, path: Path) -> list[int]:
    """Tokens in the order in which they become candidates, for greedy and seeded requests."""
    scores = (
        table.distribution(seq, path).log() if not seq.params.greedy else table.after(seq, path)
    )
    if seq.params.seed is not None:
        scores = scores + gumbel([seq.params.seed], [len(seq.tokens) + len(path)], VOCAB)[0]
    return scores.sort(descending=True).indices.tolist()


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_static_tree_of_a_request_without_chance(shape: Shape, kind: str) -> None:
    table, seq = Table(3), request(KINDS[kind])
    tree, slots = table.grow([StaticTree(Slice(seq, 1, 3), shape, CPU)])[0]
    expected: list[Path] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        above = expected[parent] if parent >= 0 else ()
        expected.append((*above, ranked_by_hand(table, seq, above)[rank]))
    assert strings(tree) == expected
    assert (tree.parents, tree.draw) == (shape.parents, Draw.POINT)
    check_slots(tree, slots, table.expanded.get(0, []))


@pytest.mark.parametrize("name", ["chain", "tree", "sparse"])
def test_static_tree_of_a_sampled_request_carries_its_distributions(name: str) -> None:
    shape, table, seq = SHAPES[name], Table(4), request(KINDS["sampled"])
    trees = []
    for seed in (1, 2, 1):
        tree, slots = table.grow([StaticTree(Slice(seq, 1, 3), shape, CPU)], seed)[0]
        assert tree.draw is (Draw.WITHOUT_REPLACEMENT if shape.branches else Draw.IID)
        assert tree.q is not None
        for node, path in enumerate(strings(tree)):
            assert torch.allclose(tree.q[node], table.distribution(seq, path[:-1]), atol=1e-6)
        assert len(set(strings(tree))) == len(tree)
        check_slots(tree, slots, table.expanded[0])
        trees.append(tree.tokens.tolist())
    first, other, again = trees
    assert first == again != other


def test_trees_of_all_kinds_grow_together_as_they_do_alone() -> None:
    """Different shapes, depths and rules in one batch, without unseeded sampling."""

    def make() -> list[GrowingTree]:
        params_list = [KINDS["greedy"], KINDS["seeded"], KINDS["penalised"], KINDS["seeded"]]
        items = [Slice(request(params, i), 1, 3) for i, params in enumerate(params_list)]
        return [
            StaticTree(items[0], SHAPES["tree"], CPU),
            DynamicTree(items[1], 2, 3, 5, CPU),
            StaticTree(items[2], SHAPES["chain"], CPU),
            DynamicTree(items[3], 4, 2, 7, CPU),
        ]

    together = Table(5).grow(make())
    alone = [Table(5).grow([tree])[0] for tree in make()]
    for (tree, slots), (other, own_slots) in zip(together, alone, strict=True):
        assert strings(tree) == strings(other) and slots == own_slots


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_logits_of_some_tokens(kind: str) -> None:
    """The same candidates as over the whole vocabulary, where no other token is likely."""
    item = Slice(request(KINDS["greedy"]), 1, 3)
    tree: GrowingTree = DynamicTree(item, 3, 3, 5, CPU)
    if kind == "static":
        tree = StaticTree(item, SHAPES["tree"], CPU)
    ids = torch.arange(1, VOCAB, 2)
    logits = torch.randn(1, len(ids), generator=torch.Generator().manual_seed(0))
    whole = torch.full((1, VOCAB), -torch.inf).index_copy(1, ids, logits)
    (tokens, weights), *_ = tree_candidates([tree], [1], ReducedLogits(logits, ids, VOCAB), None)
    (wanted, wide), *_ = tree_candidates([tree], [1], whole, None)
    assert torch.equal(tokens, wanted) and (weights is None) == (wide is None)
    if weights is not None and wide is not None:
        assert torch.allclose(weights, wide)


def test_noise_goes_by_the_token_not_by_its_place_among_some() -> None:
    """A seeded request's candidates are those that the noise of their ids chooses."""
    tree = DynamicTree(Slice(request(KINDS["seeded"]), 1, 3), 3, 3, 5, CPU)
    ids = torch.arange(1, VOCAB, 2)
    logits = torch.randn(1, len(ids), generator=torch.Generator().manual_seed(0))
    whole = torch.full((1, VOCAB), -torch.inf).index_copy(1, ids, logits)
    (tokens, _), *_ = tree_candidates([tree], [1], ReducedLogits(logits, ids, VOCAB), None)
    (wanted, _), *_ = tree_candidates([tree], [1], whole, None)
    assert torch.equal(tokens, wanted)


# --- the likeliest -------------------------------------------------------------------------------


def test_likeliest_are_the_largest_distributions() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=5)):
        rows = Rows((request(params),) * 6, (0,) * 6)
        sharp = torch.softmax(GREEDY_SHARPNESS * logits, -1)
        distribution = sharp if params.greedy else probabilities(logits, rows)
        tokens, weights = top_candidates(logits, rows, 4)
        assert tokens.equal(distribution.topk(4).indices)
        assert torch.allclose(weights, distribution.topk(4).values.log())


def test_likeliest_of_a_mixed_batch() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    seqs = tuple(request(params) for params in KINDS.values())
    tokens, weights = top_candidates(logits, Rows(seqs, (0,) * 4), 3)
    for row, seq in enumerate(seqs):
        own = top_candidates(logits[row : row + 1], Rows((seq,), (0,)), 3)
        assert tokens[row].equal(own[0][0]) and torch.allclose(weights[row], own[1][0])


def test_with_equal_distributions_the_likeliest_of_a_seeded_request_is_the_verifiers_choice() -> (
    None
):
    """The same noise at the same position, at the root and below it."""
    for seed in range(40):
        seq, table = request(SamplingParams(temperature=1.0, seed=seed)), Table(seed)
        tree, _ = table.grow([DynamicTree(Slice(seq, 1, 3), 3, 2, 6, CPU)])[0]
        logits = torch.stack([table.after(seq, path) for path in [(), *strings(tree)]])
        whole = replace(tree, wants_choices=True)
        (verdict,) = Verifier()(logits, [judged(seq, 0, whole)])
        first = top_candidates(table.after(seq, ())[None], Rows((seq,), (0,)), 1)[0]
        assert int(first) == verdict.choices[0] == verdict.tokens[0]
        for node, path in enumerate(strings(tree)):
            rows = Rows((seq,), (len(path),), torch.tensor([path]))
            own = top_candidates(table.after(seq, path)[None], rows, 1)[0]
            assert int(own) == verdict.choices[node + 1]
        assert len(verdict.path) >= 1
