"""Block drafters: what the engine drafts is what a dense computation says, in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import ConfigError, ModelLoadError, SamplingParams
from paceline.build import EngineOptions, build_engine
from paceline.core.sequence import SequenceState
from paceline.draft.heads.block import BlockDrafter
from paceline.draft.heads.block_head import (
    BlockConfig,
    BlockHead,
    load_block,
    save_block,
)
from paceline.draft.spec import DraftContext, PreparedDraft, TargetShape
from paceline.draft.trees.levels import GrowthSettings
from paceline.draft.trees.policy import Policy
from paceline.engine.driver import Drive
from paceline.model.probe import ATTENTION
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache
from support.engine_models import VOCAB, adapted

DSPARK = {"from_anchor": True, "markov_rank": 6, "confidence": True, "confidence_with_markov": True}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash of DeepSpec": {"from_anchor": True},
    "dflash of JetSpec": {"causal": True},
    "dspark": DSPARK,
    "dspark, gated": DSPARK | {"markov_type": "gated"},
}
PROMPTS = [list(range(5, 25)), [3, 1, 4, 1, 5], [7] * 9 + [8]]
TARGET = TargetShape(32, VOCAB, 2)


def random_block(**changes: Any) -> BlockHead:
    """Two layers for ``adapted()``; logits far from uniform, so that wrong rows show."""
    sizes = {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    target = {"vocab_size": VOCAB, "target_layers": 2, "feature_layers": (0, 2)}
    block = {"layers": 2, "block_size": 5, "mask_token": 96, "max_positions": 160}
    config = BlockConfig(**{**sizes, **target, **block, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids = torch.arange(0, VOCAB, 2)[: config.columns] if config.reduced else None
        head = BlockHead(config, ids)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(3.0)
    return head.eval()


@torch.inference_mode()
def reference_chain(target: CausalModel, head: BlockHead, tokens: list[int]) -> list[int]:
    """Greedy drafts from transformers' own hidden states, without any cache."""
    target.hf.set_attn_implementation("sdpa")
    try:
        states = target.hf(
            torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
    finally:
        target.hf.set_attn_implementation(ATTENTION)
    config, count = head.config, len(tokens) - 1
    size = config.block_size
    seen = torch.ones(size, count + size, dtype=torch.bool)
    if config.causal:
        seen = seen.tril(count)
    features = torch.cat([states[n][0, :count] for n in config.feature_layers], -1)
    context = list(head.context(features, torch.arange(count)))

    def attend(query, key, value, *, layer, scaling):
        keys, values = (
            torch.cat(pair, 2) for pair in zip(context[layer], (key, value), strict=True)
        )
        out = nn.functional.scaled_dot_product_attention(
            query, keys, values, seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    rows = torch.tensor([tokens[-1]] + [config.mask_token] * (size - 1))
    embed, lm_head = target.hf.get_input_embeddings(), target.hf.get_output_embeddings()
    outputs = head(embed(rows), count + torch.arange(len(rows)), attend)[-config.drafts :]
    drafted, before = [], tokens[-1]
    for row in outputs:
        logits, bias = lm_head(row), head.bias(row, torch.tensor(before))
        before = int((logits if bias is None else logits + bias).argmax())
        drafted.append(before)
    return drafted


def drafts_of(
    head: BlockHead, policy: Policy, batch: int, **options: Any
) -> tuple[CausalModel, list[tuple[list[int], list[int]]]]:
    """The target, and the drafts with the tokens that they follow."""
    target, seen = adapted(0), list[tuple[list[int], list[int]]]()

    class Recorder(BlockDrafter):
        def propose(self, plan):
            trees = super().propose(plan)
            for item, tree in zip(plan.slices, trees, strict=True):
                if len(tree):
                    seen.append((list(item.seq.tokens), tree.tokens.tolist()))
            return trees

    def build(context: DraftContext) -> BlockDrafter:
        cache = context.new_cache(head.config.cache_shapes, torch.float32)
        most = replace(policy, levels=head.config.drafts)
        levels = GrowthSettings("block", cache, most, context.generator, 0.3)
        return Recorder(target.backend.block(head, target), levels)

    given = {"draft_length": 8, "max_batch_size": batch, **options}
    generator = torch.Generator().manual_seed(0)
    engine = build_engine(target, PreparedDraft(build), EngineOptions(**given), generator)
    engine.scheduler.config = replace(engine.scheduler.config, prefill_chunk=7)
    asked = SamplingParams(max_tokens=12, ignore_eos=True)
    states = [SequenceState(n, list(p), len(p), asked) for n, p in enumerate(PROMPTS)]
    for _ in Drive(engine, states):
        check_cache(engine.cache)
        check_cache(engine.drafter.cache)  # type: ignore[attr-defined]
    cache = engine.drafter.cache  # type: ignore[attr-defined]
    assert cache.pool.available == cache.num_blocks
    return target, seen


@pytest.mark.broad
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_chains_equal_the_dense_computation(kind: str, batch: int) -> None:
    """Also after rejected drafts, whose keys and values in the cache are overwritten."""
    head = random_block(**KINDS[kind])
    target, seen = drafts_of(head, Policy(), batch)
    assert len(seen) > 12
    for tokens, drafted in seen:
        assert drafted == reference_chain(target, head, tokens)[: len(drafted)]
    if not head.config.confidence:
        assert max(len(drafted) for _, drafted in seen) == head.config.drafts


def test_trees_of_one_pass_contain_the_chain() -> None:
    head = random_block(**DSPARK)
    target, seen = drafts_of(head, Policy(nodes=9, width=3), 1)
    assert max(len(drafted) for _, drafted in seen) == 9
    for tokens, drafted in seen:
        assert reference_chain(target, head, tokens)[0] in drafted


def test_chains_end_where_the_head_is_unsure() -> None:
    head = random_block(**DSPARK)
    assert head.confidence_head is not None
    for bias, length in ((-50.0, 1), (50.0, 5)):
        nn.init.constant_(head.confidence_head.proj.bias, bias)
        _, seen = drafts_of(head, Policy(), 3)
        assert {len(drafted) for _, drafted in seen[:9]} == {length}


def test_verdicts_correct_a_head_that_is_too_sure() -> None:
    """It gives each token a chance of 0.88, and hardly any is accepted."""
    head = random_block(**DSPARK)
    assert head.confidence_head is not None
    nn.init.zeros_(head.confidence_head.proj.weight)
    nn.init.constant_(head.confidence_head.proj.bias, 2.0)
    _, seen = drafts_of(head, Policy(), 1)
    later = [drafted for tokens, drafted in seen if tokens[: len(PROMPTS[2])] == PROMPTS[2]]
    assert (len(seen[0][1]), len(later[0])) == (5, 1)


def same(head: BlockHead, other: BlockHead) -> bool:
    weights = other.state_dict()
    return other.config == head.config and all(
        torch.equal(value, weights[name]) for name, value in head.state_dict().items()
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["z-lab", "deepspec", "speculators"])
def test_layouts_are_read_as_they_were_written(layout: str, causal: bool, tmp_path: Path) -> None:
    """Two of the layouts number layers by their outputs, one less than by inputs."""
    changes = {"z-lab": {}, "deepspec": DSPARK, "speculators": DSPARK}[layout]
    head = random_block(**changes, causal=causal)
    if causal and layout == "speculators":
        with pytest.raises(ConfigError, match="cannot hold this head; use 'deepspec'"):
            save_block(head, tmp_path, layout)
        return
    save_block(head, tmp_path, layout, "org/target")
    kind = "dspark" if changes else "dflash"
    assert same(head, load_block(str(tmp_path), TARGET, kind))
    said = json.loads((tmp_path / "config.json").read_text())
    layers = {
        "z-lab": lambda: said["dflash_config"]["target_layer_ids"],
        "deepspec": lambda: said["target_layer_ids"],
        "speculators": lambda: said["aux_hidden_state_layer_ids"],
    }[layout]()
    assert layers == ([0, 2] if layout == "speculators" else [-1, 1])
    assert load_block(str(tmp_path), TARGET, kind, (1, 2)).config.feature_layers == (1, 2)


def test_a_draft_vocabulary_is_read_and_drafted(tmp_path: Path) -> None:
    head = random_block(draft_vocab_size=40, has_lm_head=True)
    save_block(head, tmp_path, "speculators")
    loaded = load_block(str(tmp_path), TARGET, "dflash")
    assert same(head, loaded) and torch.equal(loaded.draft_ids, head.draft_ids)
    _, seen = drafts_of(loaded.eval(), Policy(), 1)
    assert seen and all(token % 2 == 0 for _, drafted in seen for token in drafted)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "dspark", "holds no DSpark head but a DFlash head; use --draft dflash:"),
        ({"mask_token_id": None}, "dflash", "has no mask_token_id"),
        ({"layer_types": ["sliding_attention"] * 2}, "dflash", "has sliding windows"),
        ({"hidden_size": 64}, "dflash", "hidden size 64, but this one has 32"),
        ({"num_target_layers": 3}, "dflash", "number of layers 3"),
        ({"num_hidden_layers": 3}, "dflash", "lacks the weight layers.2"),
        ({"block_size": 1}, "dflash", "a block of 1 drafts nothing"),
        ({"mask_token_id": VOCAB}, "dflash", "is not one of"),
        ({"target_layer_ids": [0, 2]}, "dflash", "do not exist"),
        ({"target_layer_ids": "all"}, "dflash", "not a list of layer numbers"),
        ({"dflash_config": 5}, "dflash", "has no mask_token_id"),
        ({"layer_types": 5, "mask_token_id": None}, "dflash", "has no mask_token_id"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], kind: str, words: str, tmp_path: Path
) -> None:
    save_block(random_block(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config["dflash_config"]
    for key, value in changes.items():
        (nested if key in nested else config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_block(str(tmp_path), TARGET, kind)
    assert "\n" not in str(caught.value)


def test_a_markov_head_with_a_state_is_refused(tmp_path: Path) -> None:
    save_block(random_block(**DSPARK), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_head_type": "rnn"}))
    with pytest.raises(ModelLoadError, match="type 'rnn' is not supported; vanilla and gated are"):
        load_block(str(tmp_path), TARGET, "dspark")
