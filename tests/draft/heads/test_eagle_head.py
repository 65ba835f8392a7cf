"""Layout, shapes and recurrence of the EAGLE head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from paceline.errors import ConfigError
from support.random_heads import eagle_config, expanded

EAGLE3 = eagle_config(feature_layers=(2, 3, 6))
EAGLE1 = replace(EAGLE3, version=1, target_hidden_size=32, feature_layers=(6,), draft_vocab_size=40)
IDS = (1, 2, 5, 30, 39)


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scaling: float
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def test_names_and_shapes_of_an_eagle3_head_are_the_public_ones() -> None:
    shapes = {name: tuple(t.shape) for name, t in EagleHead(EAGLE3, IDS).state_dict().items()}
    assert shapes == {
        "fc.weight": (32, 72),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (5, 32),
        "d2t": (5,),
        "t2d": (40,),
    }


def test_names_of_an_eagle1_head_are_the_public_ones() -> None:
    names = set(EagleHead(replace(EAGLE1, has_embedding=True)).state_dict())
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {"layers.0.post_attention_layernorm.weight"}
    assert names == {"fc.weight", "embed_tokens.weight"} | layer


def test_draft_ids_are_stored_as_offsets() -> None:
    head = EagleHead(EAGLE3, IDS)
    assert head.d2t.dtype == torch.int64
    assert head.d2t.tolist() == [1, 1, 3, 27, 35]
    assert head.t2d.nonzero().flatten().tolist() == list(IDS)
    assert head.to_target_ids(torch.tensor([[4, 0]])).tolist() == [[39, 1]]


def test_expanded_logits_are_minus_infinity_outside_the_draft_vocabulary() -> None:
    head = EagleHead(EAGLE3, IDS)
    logits = torch.randn(3, 5)
    full = expanded(head, logits)
    assert full.shape == (3, 40)
    assert torch.equal(full[:, list(IDS)], logits)
    assert int(full.isinf().sum()) == 3 * 35


@pytest.mark.parametrize("config", [EAGLE3, EAGLE1, replace(EAGLE3, norm_before_residual=True)])
def test_a_row_depends_on_earlier_rows_and_on_relative_positions_only(config: EagleConfig) -> None:
    torch.manual_seed(0)
    ids = IDS if config.version == 3 else None
    head = EagleHead(config, ids, target_head=lambda hidden: hidden @ torch.ones(32, 40))
    features = torch.randn(7, len(config.feature_layers) * config.target_hidden_size)
    embeds = torch.randn(7, 32)
    positions = torch.arange(7)
    with torch.inference_mode():
        hidden = head(embeds, head.fuse(features), positions, attend_causal)
        assert hidden.shape == (7, 32)
        assert head.logits(hidden).shape == (7, config.draft_vocab_size)
        moved = head(embeds, head.fuse(features), positions + 11, attend_causal)
        torch.testing.assert_close(hidden, moved, rtol=1e-4, atol=1e-5)
        changed = embeds.clone()
        changed[3] += 1
        other = head(changed, head.fuse(features), positions, attend_causal)
    torch.testing.assert_close(other[:3], hidden[:3])
    assert not torch.allclose(other[4], hidden[4])


def test_gradients_reach_every_weight_in_bfloat16() -> None:
    head = EagleHead(EAGLE3, IDS).to(torch.bfloat16)
    hidden = head.fuse(torch.randn(7, 72, dtype=torch.bfloat16))
    embeds = torch.randn(7, 32, dtype=torch.bfloat16)
    for _ in range(2):
        hidden = head(embeds, hidden, torch.arange(7), attend_causal)
    head.logits(hidden).float().logsumexp(-1).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_scaled_rotary_embeddings_are_those_of_transformers() -> None:
    scaled = replace(EAGLE3, rope_scaling={"rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(
        EagleHead(scaled, IDS).rotary.inv_freq, EagleHead(EAGLE3, IDS).rotary.inv_freq / 2
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2 is unknown"),
        ({"feature_layers": (2, 7)}, r"feature layers \[7\] do not exist"),
        ({"draft_vocab_size": 41}, "exceeds the target's 40"),
        ({"kv_heads": 3}, "cannot share"),
        ({"version": 1}, "one target layer at the target's own width"),
    ],
)
def test_impossible_heads_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(EAGLE3, **changes)  # type: ignore[arg-type]


def test_an_eagle1_head_without_the_targets_head_says_so() -> None:
    with pytest.raises(ConfigError, match="target_head"):
        EagleHead(EAGLE1).logits(torch.zeros(1, 32))


def test_default_layers_are_those_of_the_papers() -> None:
    assert default_feature_layers(3, 32) == (2, 16, 29)
    assert default_feature_layers(1, 32) == (32,)
