"""Drafting with a part of the target, in the target's own cache."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from embedded_target import train_tokenizer
from paceline.build import EngineOptions, build_engine, seeded_generator
from paceline.core.batch import Batch, ModelOutput
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft import selfspec
from paceline.draft.selfspec import LayerSkip, SelfDrafter, skippable, spread
from paceline.draft.spec import LoadContext, TargetShape
from paceline.drafters import prepare_one
from paceline.engine.driver import Drive
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.model.copies import layer_view
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache
from support.diagonal import diagonal
from support.engine_models import adapted, random_llama, reference_logits
from support.tiny_models import SENTENCES

LAYERS = 5
GREEDY = SamplingParams(max_tokens=28, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=28, temperature=1.0, seed=4, ignore_eos=True)
ASKED = {"greedy": GREEDY, "seeded": SEEDED}
STEM = list(range(1, 36))  # two full blocks: they are shared
SPECS = {
    "early exit": "early_exit:layers=3",
    "early exit, tree": "early_exit:layers=3,branching=3x2",
    "early exit, dynamic": "early_exit:layers=4,nodes=2,width=5",
    "fixed set": "layer_skip:skip=2x4",
    "spread set": "layer_skip",
    "spread set, dynamic": "layer_skip:nodes=8,width=4",
    "fewer bits": "quantized:int4",
    "fewer bits, dynamic": "quantized:int8,nodes=8,width=4",
}


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return adapted(layers=LAYERS)


tokenizer = lru_cache(partial(train_tokenizer, SENTENCES, 320))


def engine_of(model: CausalModel, spec: str, length: int = 3, **options: int) -> Engine:
    prepared = prepare_one(spec, LoadContext(model, tokenizer(), "float32"))
    params_list = EngineOptions(**{"draft_length": length, "max_batch_size": 4, **options})
    return build_engine(model, prepared, params_list, seeded_generator(model.device, 0))


def requests(params: SamplingParams) -> list[SequenceState]:
    prompts = [STEM, [*STEM, 40, 41], [5], [*STEM[:20], 50]]
    return [SequenceState(i, list(tokens), len(tokens), params) for i, tokens in enumerate(prompts)]


def committed_rows(engine: Engine, seq: SequenceState) -> list[torch.Tensor]:
    cache = engine.cache
    slots = torch.tensor([cache._slot(seq.seq_id, index) for index in range(seq.cached)])
    return [part[slots] for n in range(LAYERS) for part in cache.kv(n)]


Plain = tuple[list[SequenceState], dict[int, list[torch.Tensor]]]


@pytest.fixture(scope="module")
def plain(model: CausalModel) -> dict[str, Plain]:
    """Requests decoded without drafts, and the cache rows written for each."""
    found = {}
    for name, params in ASKED.items():
        engine, seqs = engine_of(model, "none", 0), requests(params)
        rows: dict[int, list[torch.Tensor]] = {}
        for _ in Drive(engine, seqs):
            rows |= {seq.seq_id: committed_rows(engine, seq) for seq in engine.scheduler.running}
        found[name] = seqs, rows
    return found


@pytest.mark.broad
@pytest.mark.parametrize(("spec", "asked"), diagonal(list(SPECS), list(ASKED)))
def test_the_cache_holds_the_targets_own_rows_only(
    model: CausalModel, plain: dict[str, Plain], spec: str, asked: str
) -> None:
    """After every step each committed row equals plain decoding's, and so does the text."""
    expected, rows = plain[asked]
    engine, seqs = engine_of(model, SPECS[spec]), requests(ASKED[asked])
    compared = 0
    for _ in Drive(engine, seqs):
        check_cache(engine.cache)
        for seq in engine.scheduler.running:
            for own, wanted in zip(committed_rows(engine, seq), rows[seq.seq_id], strict=True):
                count = min(len(own), len(wanted))
                assert torch.allclose(own[:count], wanted[:count], atol=2e-5)
                compared += count
    assert [seq.tokens for seq in seqs] == [seq.tokens for seq in expected]
    assert compared > 1000
    assert sum(seq.counts.accepted for seq in seqs) > 0
    assert engine.cache.pool.available == engine.cache.num_blocks


@pytest.mark.parametrize("spec", ["early_exit:layers=3,nodes=8", "layer_skip"])
def test_no_view_writes_to_a_shared_or_committed_block(
    model: CausalModel, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, spec)
    pool, size = engine.cache.pool, engine.cache.block_size
    written: list[int] = []
    call, drafter = CausalModel.__call__, engine.drafter
    assert isinstance(drafter, SelfDrafter)

    def watched(ran: CausalModel, batch: Batch, cache: PagedCache) -> ModelOutput:
        for block in {slot // size for slot in batch.slots} if ran is drafter.view else ():
            assert pool._refs[block] == 1 and block not in pool._digest
            written.append(block)
        return call(ran, batch, cache)

    monkeypatch.setattr(CausalModel, "__call__", watched)
    shared = False
    for _ in Drive(engine, requests(GREEDY)):
        shared = shared or max(pool._refs) > 1
    assert shared and written


def test_early_exit_drafts_what_the_first_layers_say(model: CausalModel) -> None:
    """A chain against forwards of a model that has these layers only."""
    shorter = CausalModel(random_llama(0, LAYERS), "shorter")
    shorter.hf.model.layers = shorter.hf.model.layers[:3]
    shorter.hf.config.num_hidden_layers = 3
    engine = engine_of(model, "early_exit:layers=3", 4)
    propose, seen = engine.drafter.propose, 0

    def checked(plan):
        nonlocal seen
        trees = propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            tokens = list(item.seq.tokens)
            for token in tree.tokens.tolist():
                # The context's keys are the whole target's, in these layers the very same.
                assert token == int(reference_logits(shorter, tokens)[-1].argmax())
                tokens.append(token)
                seen += 1
        return trees

    engine.drafter.propose = checked
    for _ in Drive(engine, requests(GREEDY)[:3]):
        pass
    assert seen > 100


def test_all_layers_are_always_right(model: CausalModel) -> None:
    """The view of everything drafts as the target decides, greedy and with a seed."""
    view = layer_view(model, range(LAYERS))
    for params in (GREEDY, SEEDED):
        engine = engine_of(model, "early_exit:layers=1")
        assert isinstance(engine.drafter, SelfDrafter)
        engine.drafter.view = view
        seqs = requests(params)
        for _ in Drive(engine, seqs):
            pass
        for seq in seqs:
            assert seq.counts.accepted == seq.counts.drafted > 0


@pytest.mark.broad
@pytest.mark.parametrize(
    "spec",
    ["early_exit:layers=3,nodes=8", "layer_skip", "quantized:int4"],
)
def test_preemption_and_chunks_change_nothing(model: CausalModel, spec: str) -> None:
    per_token = LAYERS * (2 * 2 * 8) * 4  # layers x kv heads x (key + value) x float32
    results = []
    for memory in (None, 144 * per_token):
        engine = engine_of(model, spec, kv_cache_memory=memory)
        engine.scheduler.config = replace(engine.scheduler.config, prefill_chunk=7)
        seqs = requests(replace(SEEDED, max_tokens=40))  # shorter ones are promised all they need
        for _ in Drive(engine, seqs):
            check_cache(engine.cache)
        results.append([seq.tokens for seq in seqs])
        assert (engine.scheduler.preemptions > 0) == (memory is not None)
    assert results[0] == results[1]


def test_nothing_is_drafted_behind_a_long_prompt_chunk(model: CausalModel) -> None:
    engine = engine_of(model, "early_exit:layers=3")
    seq = requests(GREEDY)[0]
    drafted = []
    for _ in Drive(engine, [seq]):
        drafted.append(seq.counts.drafted)
    assert drafted[:3] == [0, 3, 6]


def test_rehearsal_leaves_no_trace(model: CausalModel) -> None:
    for spec in SPECS.values():
        engine = engine_of(model, spec)
        for batch in (1, 3, 500):
            engine.drafter.warm_up(batch)
        check_cache(engine.cache)
        assert engine.cache.pool.available == engine.cache.num_blocks
        length = 4
        nodes = engine.drafter.max_nodes(length)
        assert 1 <= engine.drafter.passes(length) <= min(length, nodes)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, (0, 2, 4)),
        ({"ratio": 0.9}, (0, 4)),
        ({"ratio": 0.01}, (0, 1, 3, 4)),
        ({"skip": (0, 4)}, (1, 2, 3)),
    ],
)
def test_which_layers_are_left(
    model: CausalModel,
    options: dict[str, Any],
    layers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views: list[tuple[int, ...]] = []

    def view(target: CausalModel, kept: list[int]) -> CausalModel:
        views.append(tuple(kept))
        return layer_view(target, kept)

    monkeypatch.setattr(selfspec, "layer_view", view)
    engine_of(model, str(LayerSkip(**options)))
    assert views == [layers]


def test_a_set_is_spread_over_the_middle() -> None:
    assert skippable(12) == tuple(range(1, 11))
    assert skippable(2) == (1,) and skippable(1) == ()
    assert spread(range(1, 11), 5) == (2, 4, 6, 8, 10)
    assert spread((1, 2, 3), 1) == (2,) and spread((1, 2, 3), 3) == (1, 2, 3)


def test_a_layer_named_twice_is_one_layer() -> None:
    examined = LayerSkip(skip=(3, 1, 3)).examine(TargetShape(8, 8, 5))
    assert "3 of the target's 5 layers" in examined.notes[0][1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("layer_skip:skip=two", "not like 2x3x8"),
        ("layer_skip:skip=2-3", "not like 2x3x8"),
        ("layer_skip:skip=-2", "the target's layers 0 to 4"),
        ("layer_skip:skip=3x9", "the target's layers 0 to 4"),
        ("layer_skip:skip=0x1x2x3x4", "not all"),
        ("layer_skip:skip=2,ratio=0.5", "skip fixes the set; leave out ratio"),
        ("layer_skip:ratio=1", "ratio is 1.0; it must be above 0 and below 1"),
        ("layer_skip:window=8", "no option window"),
        ("early_exit:layers=5", "layers=5, but the target has 5"),
        ("early_exit:layers=0", "layers=0, but the target has 5"),
        ("early_exit:skip=2", "no option skip"),
    ],
)
def test_senseless_options_are_refused(model: CausalModel, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(model, spec)


def test_a_model_of_one_layer_cannot_skip_it() -> None:
    with pytest.raises(ConfigError, match="one layer"):
        engine_of(adapted(layers=1), "layer_skip")
