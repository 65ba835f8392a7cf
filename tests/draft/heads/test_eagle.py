"""The EAGLE drafter feeds its head the right rows: proposals equal a dense computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.build import EngineOptions, build_engine, cache_blocks, max_feature_tokens
from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.heads import features
from paceline.draft.heads.eagle import EagleDrafter, ParallelEagleDrafter
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.spec import DraftContext, PreparedDraft
from paceline.draft.trees.levels import GrowthSettings
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape
from paceline.engine.driver import Drive
from paceline.engine.engine import Engine
from paceline.model.backends.base import EagleStep
from paceline.model.paged.cache import bytes_per_token
from paceline.model.probe import ATTENTION
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache
from support.engine_models import adapted
from support.random_heads import dense_attention, expanded, random_head

LENGTH = 3


@torch.inference_mode()
def reference_chain(target: CausalModel, head: EagleHead, tokens: list[int], first: int = 0):
    """LENGTH greedy tokens from transformers' own hidden states, without any cache.

    Rows before position ``first`` are left out.
    """
    target.hf.set_attn_implementation("sdpa")
    try:
        states = target.hf(
            torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
    finally:
        target.hf.set_attn_implementation(ATTENTION)
    embed = target.hf.get_input_embeddings()
    joined = torch.cat([states[n][0] for n in head.config.feature_layers], -1)
    hidden = head.fuse(joined[first:-1])
    ids = list(tokens[first + 1 :])
    if head.config.mask_token is not None:
        ids += [head.config.mask_token] * (LENGTH - 1)
        hidden = torch.cat((hidden, head.fuse(head.mask_hidden.expand(LENGTH - 1, -1))))
        outputs = head(embed(torch.tensor(ids)), hidden, torch.arange(len(ids)), dense_attention)
        return expanded(head, head.logits(outputs[-LENGTH:])).argmax(-1).tolist()
    drafted: list[int] = []
    for _ in range(LENGTH):
        outputs = head(embed(torch.tensor(ids)), hidden, torch.arange(len(ids)), dense_attention)
        logits = expanded(head, head.logits(outputs[-1:]))
        drafted.append(int(logits.argmax()))
        ids.append(drafted[-1])
        hidden = torch.cat((hidden, outputs[-1:]))
    return drafted


def engine_of(
    target: CausalModel, head: EagleHead, policy: Policy, **options: object
) -> tuple[Engine, list[tuple[list[int], list[int], int]]]:
    """An engine, and a list to which its drafter appends (tokens, proposal, start)."""
    seen: list[tuple[list[int], list[int], int]] = []

    mask = head.config.mask_token

    class Recorder(EagleDrafter if mask is None else ParallelEagleDrafter):  # type: ignore[misc]
        def propose(self, plan):
            trees = super().propose(plan)
            for item, tree in zip(plan.slices, trees, strict=True):
                if len(tree):
                    missing = len(item.seq.tokens) - 1 - len(self._rows[item.seq.seq_id].keys)
                    seen.append((list(item.seq.tokens), tree.tokens.tolist(), missing))
            return trees

    def build(context: DraftContext) -> EagleDrafter:
        cache = context.new_cache(head.config.cache_shapes, torch.float32)
        step = EagleStep(head, target.hf.get_input_embeddings())
        levels = GrowthSettings("eagle", cache, policy, context.generator)
        return Recorder(step, levels) if mask is None else Recorder(mask, step, levels)

    given = EngineOptions(**{"draft_length": LENGTH, **options})
    engine = build_engine(target, PreparedDraft(build), given, torch.Generator().manual_seed(0))
    engine.scheduler.config = replace(engine.scheduler.config, prefill_chunk=7)
    return engine, seen


def finish(drive: Drive) -> None:
    engine = drive.engine
    for _ in drive:
        check_cache(engine.cache)
        check_cache(engine.drafter.cache)  # type: ignore[attr-defined]
    own = engine.drafter.cache  # type: ignore[attr-defined]
    assert own.pool.available == own.num_blocks


def request(seq_id: int, tokens: list[int], **params: object) -> SequenceState:
    asked = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return SequenceState(seq_id, list(tokens), len(tokens), asked)


PROMPTS = [list(range(5, 25)), [3, 1, 4, 1, 5], [7] * 9 + [8]]


@pytest.mark.parametrize(("version", "mask"), [(1, None), (3, None), (3, 7)])
@pytest.mark.parametrize("batch", [1, 3])
def test_chains_equal_the_dense_computation(version: int, mask: int | None, batch: int) -> None:
    target = adapted(0)
    head = random_head(target, version, mask)
    engine, seen = engine_of(target, head, Policy(), max_batch_size=batch)
    finish(Drive(engine, [request(index, prompt) for index, prompt in enumerate(PROMPTS)]))
    assert len(seen) > 12
    assert engine.drafter.passes(LENGTH) == (LENGTH if mask is None else 1)
    for tokens, proposal, missing in seen:
        assert missing == 0
        assert proposal == reference_chain(target, head, tokens)[: len(proposal)]


def test_static_and_dynamic_trees_contain_the_chain() -> None:
    target = adapted(0)
    head = random_head(target, 3)
    for policy in (Policy(Shape.branching((2, 2, 1))), Policy(nodes=8, width=3)):
        engine, seen = engine_of(target, head, policy)
        finish(Drive(engine, [request(0, PROMPTS[0])]))
        for tokens, proposal, _ in seen:
            assert reference_chain(target, head, tokens)[0] == proposal[0]


def test_a_shared_prefix_is_found_again_or_left_out() -> None:
    target = adapted(0)
    head = random_head(target, 3)
    prompt = [(11 * i) % 90 for i in range(50)]
    engine, seen = engine_of(target, head, Policy())
    finish(Drive(engine, [request(0, prompt)]))
    seen.clear()
    # The same beginning: the target's blocks are shared, and so are the head's.
    finish(Drive(engine, [request(1, [*prompt[:40], 9, 9, 9])]))
    assert seen and all(missing == 0 for _, _, missing in seen)
    for tokens, proposal, _ in seen:
        assert proposal == reference_chain(target, head, tokens)[: len(proposal)]
    # Another text differs in the first token after two shared blocks: one block of rows is
    # missing, as each row also holds the token after it.
    seen.clear()
    finish(Drive(engine, [request(2, [*prompt[:32], 1, 2, 3, 4])]))
    assert seen and all(0 <= missing <= 16 for _, _, missing in seen)


def test_preemption_starts_over() -> None:
    target = adapted(0)
    head = random_head(target, 1)
    tight = 8 * 16 * 4 * (2 * 2 * 2 * 8)  # 8 blocks of the target alone
    engine, seen = engine_of(
        target, head, Policy(), max_batch_size=3, kv_cache_memory=tight, prefix_sharing=False
    )
    # Two prompts of three blocks fit, but not what both grow by.
    finish(Drive(engine, [request(n, [n + 2] * 40, max_tokens=40) for n in range(3)]))
    assert engine.scheduler.preemptions > 0
    for tokens, proposal, missing in seen:
        if missing == 0:
            assert proposal == reference_chain(target, head, tokens)[: len(proposal)]
    assert any(missing == 0 for _, _, missing in seen)


# -- features that are kept --------------------------------------------------------------------


def kept_bytes(drafter: EagleDrafter) -> int:
    """Bytes that the kept features hold in memory."""
    parts = [part for state in drafter._rows.values() for part in state.pending]
    storages = [layer.untyped_storage() for part in parts for layer in part.layers]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def row_bytes(target: CausalModel, head: EagleHead) -> int:
    return len(head.config.feature_layers) * target.hidden_size * 4


class Operators(TorchDispatchMode):
    """Counts the torch operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_that_does_not_draft_costs_no_operator(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside seven neighbours that never draft. Now and then, what waits is copied, and then of
    eight rows of a forward it keeps its own."""
    monkeypatch.setattr(features, "MAX_PENDING_FEATURES", 64)
    target = adapted(0)
    head = random_head(target, version)
    engine, _ = engine_of(target, head, Policy(), max_batch_size=8, draft_length=0)
    drafter: EagleDrafter = engine.drafter  # type: ignore[assignment]
    seqs = [request(0, PROMPTS[1], max_tokens=40)]
    for index in range(1, 8):
        asked = {"drafter": "none"} if index % 2 else {"draft_length": 0}
        seqs.append(request(index, [index] * 5, max_tokens=40, **asked))
    operators, observe = Operators(), drafter.observe

    def counted(*args: Any) -> None:
        with operators:
            observe(*args)

    monkeypatch.setattr(drafter, "observe", counted)
    drive, copies = Drive(engine, seqs), 0
    for step in range(1, 30):
        operators.count, before = 0, drafter._retained_rows
        drive.step()
        copied = before > 64
        copies += copied
        assert copied == (operators.count > 0)
        rows = len(PROMPTS[1]) + step - 1
        assert len(drafter._rows[0].pending) == rows
        assert kept_bytes(drafter) <= (rows + drafter._retained_rows) * row_bytes(target, head)
        assert set(drafter._rows) == {0}
        assert len(drafter.cache._tables) <= 1
    assert copies >= 3
    drive.drop(0)
    assert not drafter._rows
    finish(drive)


def test_kept_features_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest features are dropped; later drafts use the others."""
    monkeypatch.setattr(features, "MAX_PENDING_FEATURES", 10)
    target = adapted(0)
    head = random_head(target, 3)
    engine, seen = engine_of(target, head, Policy(), max_batch_size=2, draft_length=0)
    drafter: EagleDrafter = engine.drafter  # type: ignore[assignment]
    drive = Drive(engine, [request(n, PROMPTS[n], max_tokens=60) for n in range(2)])
    for _ in range(30):
        drive.step()
        # Ten that wait of each, the step's own, and forwards that are kept whole.
        assert kept_bytes(drafter) <= (2 * 11 + 10 + 50) * row_bytes(target, head)
    assert [len(state.pending) for state in drafter._rows.values()] == [11, 11]
    engine.controller = FixedLength(LENGTH)
    drive.step()
    # The second's prompt was read in one chunk that never was run: all but the last ten are gone.
    tokens, proposal, missing = seen[-1]
    assert missing == len(tokens) - 1 - 11 > 0
    assert len(proposal) == LENGTH
    finish(drive)


def test_the_memory_of_kept_features_is_the_caches() -> None:
    """``kv_cache_memory`` is for both: many tokens, or few tokens with all their features."""
    target = adapted(0)
    own = bytes_per_token(target.cache_shapes, target.dtype)
    for memory in (1 << 16, 1 << 20, 1 << 24):
        options = EngineOptions(max_batch_size=4, kv_cache_memory=memory)
        blocks = cache_blocks(options, target, 100, 400)
        tokens = 16 * blocks
        assert blocks < cache_blocks(options, target, 100)
        assert tokens * (own + 100) + min(tokens, max_feature_tokens(4)) * 400 <= memory
        more = tokens + 16
        assert more * (own + 100) + min(more, max_feature_tokens(4)) * 400 > memory
