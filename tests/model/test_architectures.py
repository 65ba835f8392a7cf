"""Every architecture against transformers' own forward: ragged batches, chunks, chains, trees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from random_models import SPECS, VOCAB, tiny_pair
from torch import nn

from paceline.core.batch import Batch, Span
from paceline.core.tree import chain_parents
from paceline.model.paged.cache import path_moves
from paceline.model.target import CausalModel

BLOCK = 4
BLOCKS = 48
LENGTHS = (5, 17, 9, 14)
TREE = (-1, -1, 0, 0, 1, 3, -1)
# Logits of whole forwards by reference and tokens: several tests feed the same ones.
KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], torch.Tensor]] = WeakKeyDictionary()


@dataclass
class Feed:
    """Rows of one sequence: ``tokens[context : context + pending]`` and nodes of a tree."""

    seq: int
    context: int
    pending: int
    parents: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    first_new: int = 0


@dataclass
class Bench:
    """A model, its reference, and four sequences with block tables made by hand."""

    model: CausalModel
    reference: Any
    tokens: list[list[int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(1)
        self.tokens = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in LENGTHS]
        runs = [list(range(first, first + 12)) for first in (0, 36)]
        mixed = list(range(12, 36))
        rng.shuffle(mixed)
        self.tables = [runs[0], mixed[:12], mixed[12:], runs[1]]  # two runs, two scattered
        self.cache = self.model.new_cache(BLOCKS, BLOCK)

    def slot(self, seq: int, index: int) -> int:
        return self.tables[seq][index // BLOCK] * BLOCK + index % BLOCK

    def batch(self, feeds: list[Feed], rows: list[int] | None = None) -> Batch:
        ids: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for feed in feeds:
            span = Span(
                feed.seq, len(ids), feed.context, feed.pending, feed.parents, feed.first_new
            )
            ids.extend(self.tokens[feed.seq][feed.context : feed.context + feed.pending])
            ids.extend(feed.nodes[feed.first_new :])
            slots.extend(self.slot(feed.seq, index) for index in span.indices)
            spans.append(span)
        return Batch(
            input_ids=ids,
            positions=[place for span in spans for place in span.positions],
            slots=slots,
            spans=tuple(spans),
            tables=tuple(self.tables[feed.seq] for feed in feeds),
            logit_rows=rows,
        )

    def run(self, feeds: list[Feed]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(self.batch(feeds), self.cache).logits

    def truth(self, feeds: list[Feed]) -> torch.Tensor:
        """Each row's logits from whole forwards of transformers, one per root-to-node path."""
        rows: list[torch.Tensor] = []
        for feed in feeds:
            base = feed.context + feed.pending
            tokens = self.tokens[feed.seq][:base]
            rows.extend(self.whole(tokens)[feed.context : base])
            for node in range(feed.first_new, len(feed.parents)):
                path: list[int] = []
                at = node
                while at >= 0:
                    path.insert(0, feed.nodes[at])
                    at = feed.parents[at]
                rows.append(self.whole(tokens + path)[-1])
        return torch.stack(rows)

    def whole(self, tokens: list[int]) -> torch.Tensor:
        known, key = KNOWN.setdefault(self.reference, {}), tuple(tokens)
        if key not in known:
            with torch.inference_mode():
                known[key] = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return known[key]

    def check(self, feeds: list[Feed]) -> None:
        got, expected = self.run(feeds), self.truth(feeds)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))

    def keep(self, seq: int, base: int, nodes: tuple[int, ...], path: tuple[int, ...]) -> None:
        """Commit a path of tree nodes behind ``base``, as the engine does."""
        self.tokens[seq][base : base + len(path)] = [nodes[node] for node in path]
        if self.cache.states is not None:
            self.cache.states.move(path_moves(seq, base, path))
        for layer in range(self.model.num_layers):
            for store in self.cache.kv(layer):
                rows = [store[self.slot(seq, base + node)].clone() for node in path]
                for rank, row in enumerate(rows):
                    store[self.slot(seq, base + rank)] = row


def nodes_for(parents: tuple[int, ...]) -> tuple[int, ...]:
    rng = random.Random(len(parents))
    return tuple(rng.sample(range(3, VOCAB), len(parents)))


NATIVE = (
    *("llama", "llama_mha", "mistral", "mixtral", "qwen2", "qwen2_window", "qwen3"),
    *("gemma2", "gemma3"),
)


@pytest.fixture(scope="module", params=[*sorted(SPECS), *(f"native {name}" for name in NATIVE)])
def pair(request: pytest.FixtureRequest) -> tuple[CausalModel, Any]:
    """Ours, whose modules run or else the kernels, and transformers' own."""
    name: str = request.param
    model, reference = tiny_pair(name.split()[-1])
    if name.startswith("native"):
        assert model.use_backend("native"), (
            "the kernels know this architecture, and can be built here"
        )
    return model, reference


@pytest.mark.parametrize("together", [False, True], ids=["views", "padded"])
def test_ragged_steps(pair: tuple[CausalModel, Any], together: bool) -> None:
    """Prefill in chunks, then decode with chains and branching trees, four sequences at once."""
    model, reference = pair
    model.together = together
    bench = Bench(model, reference)
    chain, tree = chain_parents(3), TREE
    # Whole prompts beside the first chunk of a longer one.
    bench.check([Feed(0, 0, 5), Feed(1, 0, 10), Feed(2, 0, 9), Feed(3, 0, 14)])
    # A chain, the second chunk, a tree and plain decoding in one step.
    bench.check(
        [
            Feed(0, 5, 1, chain, nodes_for(chain)),
            Feed(1, 10, 7),
            Feed(2, 9, 1, tree, nodes_for(tree)),
            Feed(3, 14, 1),
        ]
    )
    # Accept node 1 of the chain's three, and nodes 0, 3, 5 of the tree; decode on, all drafting.
    bench.keep(0, 6, nodes_for(chain), (0,))
    bench.keep(2, 10, nodes_for(tree), (0, 3, 5))
    bench.check(
        [
            Feed(3, 15, 1, tree, nodes_for(tree)),
            Feed(2, 13, 2, chain, nodes_for(chain)),
            Feed(1, 17, 1, tree, nodes_for(tree)),
            Feed(0, 7, 1),
        ]
    )


@pytest.mark.parametrize("seq", [0, 1], ids=["run", "scattered"])
def test_level_by_level(pair: tuple[CausalModel, Any], seq: int) -> None:
    """A draft model's way: the levels of a tree computed one after another; and single rows."""
    bench = Bench(*pair)
    nodes = nodes_for(TREE)
    bench.check([Feed(seq, 0, 12)])
    bench.check([Feed(seq, 12, 1, TREE[:2], nodes[:2])])
    bench.check([Feed(seq, 13, 0, TREE[:5], nodes[:5], first_new=2)])
    bench.check([Feed(seq, 13, 0, TREE[:6], nodes[:6], first_new=5)])
    bench.check([Feed(seq, 13, 0, TREE, nodes, first_new=6)])
    for context in range(13, 20):
        bench.check([Feed(seq, context, 1)])


def test_chosen_rows_and_features(pair: tuple[CausalModel, Any]) -> None:
    """Logits of some rows only, and hidden states numbered as inputs of layers."""
    bench = Bench(*pair)
    feeds = [Feed(0, 0, 5), Feed(1, 0, 10)]
    everything = bench.run(feeds)
    layers = range(bench.model.num_layers + 1)  # the last: what the head sees
    with torch.inference_mode():
        out = bench.model(replace(bench.batch(feeds, [4, 9, 14]), features=layers), bench.cache)
        none = bench.model(bench.batch(feeds, []), bench.cache)
        hidden = bench.reference(
            torch.tensor([bench.tokens[0][:5]]), use_cache=False, output_hidden_states=True
        ).hidden_states
    assert torch.allclose(out.logits, everything[[4, 9, 14]], atol=1e-5)
    assert none.logits.shape == (0, bench.model.vocab_size)
    for layer in layers:
        assert out.features[layer].shape == (15, bench.model.hidden_size)
        error = (out.features[layer][:5] - hidden[layer][0]).abs().max()
        assert error < 1e-4 * max(1.0, float(hidden[layer].abs().max()))


def test_the_head_turns_final_features_into_logits(pair: tuple[CausalModel, Any]) -> None:
    """What drafters that share the head rely on: scales and soft caps are part of it."""
    bench = Bench(*pair)
    last = bench.model.num_layers
    with torch.inference_mode():
        feeds = [Feed(0, 0, 9)]
        out = bench.model(
            replace(bench.batch(feeds, list(range(9))), features=(last,)), bench.cache
        )
        torch.testing.assert_close(bench.model.head(out.features[last]), out.logits)


def in_bfloat16(name: str, texts: int) -> torch.Tensor:
    """How alike rows of logits in bf16 are to the float32 truth (cosine), on some texts."""
    model, _ = tiny_pair(name, torch.bfloat16)
    _, reference = tiny_pair(name)
    reference.load_state_dict({k: v.float() for k, v in model.hf.state_dict().items()})
    alike = []
    for seed in range(texts):
        bench, rng = Bench(model, reference), random.Random(seed)
        if seed:
            bench.tokens = [[rng.randrange(3, VOCAB) for _ in tokens] for tokens in bench.tokens]
        bench.run([Feed(0, 0, 5), Feed(1, 0, 10)])
        tree = [Feed(0, 5, 1, TREE, nodes_for(TREE)), Feed(1, 10, 1)]
        got, expected = bench.run(tree).float(), bench.truth(tree)
        alike.append(torch.nn.functional.cosine_similarity(got, expected))
    return torch.cat(alike)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "gemma2", "gpt_oss", "lfm2", "falcon_h1"])
def test_bfloat16(name: str) -> None:
    """The same in bf16, within its rounding of the float32 truth."""
    assert in_bfloat16(name, 1).min() > 0.99


def test_bfloat16_of_the_delta_rule() -> None:
    """Routers, and states that are divided by their norms, enlarge a rounding in some 3 rows of
    100, with transformers' step as with ours; all others are as near as a Llama's."""
    alike = in_bfloat16("qwen3_next", 20)
    assert alike.median() > 0.9995 and (alike > 0.99).float().mean() > 0.93


def test_prefill_longer_than_a_folded_span() -> None:
    """Chunks of more than 64 rows take the path for long spans, with and without context."""
    for name in ("llama", "mistral", "gemma2", "gpt_oss", "llama4", "bamba", "jamba", "qwen3_next"):
        bench = Bench(*tiny_pair(name))
        rng = random.Random(2)
        bench.tokens = [[rng.randrange(3, VOCAB) for _ in range(128)] for _ in range(2)]
        bench.tables = [list(range(32)), list(range(63, 31, -1))]
        bench.cache = bench.model.new_cache(64, BLOCK)
        for seq in (0, 1):
            bench.check([Feed(seq, 0, 66)])
        bench.check([Feed(0, 66, 1, TREE, nodes_for(TREE)), Feed(1, 66, 62)])
