"""The EAGLE drafter feeds its head the right rows: proposals equal a dense computation."""

from __future__ import annotations

import pytest
import torch

from engine_models import adapted
from paceline.build import EngineOptions, build_engine
from paceline.core.params import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft.eagle import EagleDrafter
from paceline.draft.eagle_head import EagleHead
from paceline.draft.policy import Policy
from paceline.draft.shape import Shape
from paceline.drafters import DraftContext, Prepared
from paceline.engine.engine import Engine
from paceline.model.probe import ATTENTION
from paceline.model.target import CausalModel
from random_heads import dense_attention, random_head

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
    drafted: list[int] = []
    for _ in range(LENGTH):
        outputs = head(embed(torch.tensor(ids)), hidden, torch.arange(len(ids)), dense_attention)
        logits = head.expand(head.logits(outputs[-1:]))
        drafted.append(int(logits.argmax()))
        ids.append(drafted[-1])
        hidden = torch.cat((hidden, outputs[-1:]))
    return drafted


def engine_of(
    target: CausalModel, head: EagleHead, policy: Policy, **options: object
) -> tuple[Engine, list[tuple[list[int], list[int], int]]]:
    """An engine, and the list into which its drafter's (tokens, proposal, start) go."""
    seen: list[tuple[list[int], list[int], int]] = []

    class Recorder(EagleDrafter):
        def propose(self, plan):
            trees = super().propose(plan)
            for item, tree in zip(plan.slices, trees, strict=True):
                if len(tree):
                    missing = len(item.seq.tokens) - 1 - len(self._states[item.seq.seq_id].rows)
                    seen.append((list(item.seq.tokens), tree.tokens.tolist(), missing))
            return trees

    def build(context: DraftContext) -> EagleDrafter:
        cache = context.new_cache([head.cache_shape], torch.float32)
        embed = target.hf.get_input_embeddings()
        return Recorder(head, cache, embed, policy, context.generator)

    given = EngineOptions(**{"draft_length": LENGTH, "prefill_chunk": 7, **options})
    return build_engine(target, Prepared(build), given, torch.Generator().manual_seed(0)), seen


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.cache.check()
        engine.drafter.cache.check()  # type: ignore[attr-defined]
    own = engine.drafter.cache  # type: ignore[attr-defined]
    assert own.pool.available == own.num_blocks


def request(seq_id: int, tokens: list[int], **params: object) -> Sequence:
    wish = SamplingParams(max_tokens=12, **params)  # type: ignore[arg-type]
    return Sequence(seq_id, list(tokens), len(tokens), wish)


PROMPTS = [list(range(5, 25)), [3, 1, 4, 1, 5], [7] * 9 + [8]]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_chains_equal_the_dense_computation(version: int, batch: int) -> None:
    target = adapted(0)
    head = random_head(target, version)
    engine, seen = engine_of(target, head, Policy(), max_batch_size=batch)
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(index, prompt))
    finish(engine)
    assert len(seen) > 12
    for tokens, proposal, missing in seen:
        assert missing == 0
        assert proposal == reference_chain(target, head, tokens)[: len(proposal)]


def test_static_and_best_first_trees_contain_the_chain() -> None:
    target = adapted(0)
    head = random_head(target, 3)
    for policy in (Policy(Shape.branching((2, 2, 1))), Policy(nodes=8, width=3)):
        engine, seen = engine_of(target, head, policy)
        engine.add(request(0, PROMPTS[0]))
        finish(engine)
        for tokens, proposal, _ in seen:
            assert reference_chain(target, head, tokens)[0] == proposal[0]


def test_a_shared_prefix_is_found_again_or_left_out() -> None:
    target = adapted(0)
    head = random_head(target, 3)
    prompt = [(11 * i) % 90 for i in range(50)]
    engine, seen = engine_of(target, head, Policy())
    engine.add(request(0, prompt))
    finish(engine)
    seen.clear()
    # The same beginning: the target's blocks are shared, and so are the head's.
    engine.add(request(1, [*prompt[:40], 9, 9, 9]))
    finish(engine)
    assert seen and all(missing == 0 for _, _, missing in seen)
    for tokens, proposal, _ in seen:
        assert proposal == reference_chain(target, head, tokens)[: len(proposal)]
    # Another text differs in the first token after two shared blocks: one block of rows is
    # missing, as each row also holds the token after it.
    seen.clear()
    engine.add(request(2, [*prompt[:32], 1, 2, 3, 4]))
    finish(engine)
    assert seen and all(0 <= missing <= 16 for _, _, missing in seen)


def test_preemption_starts_over() -> None:
    target = adapted(0)
    head = random_head(target, 1)
    tight = 12 * 16 * 4 * (2 * 2 * 2 * 8)  # 12 blocks of the target alone
    engine, seen = engine_of(
        target, head, Policy(), max_batch_size=3, kv_cache_memory=tight // 2, prefix_sharing=False
    )
    for index in range(3):
        engine.add(request(index, [index + 2] * 40))
    finish(engine)
    assert engine.scheduler.preemptions > 0
    for tokens, proposal, missing in seen:
        if missing == 0:
            assert proposal == reference_chain(target, head, tokens)[: len(proposal)]
    assert any(missing == 0 for _, _, missing in seen)
