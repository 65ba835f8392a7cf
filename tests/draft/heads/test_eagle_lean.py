"""The short forward of a head gives the head's own results, in every variant."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from engine_models import adapted
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.heads.eagle_lean import LeanEagle, quicken
from random_heads import dense_attention, random_head


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (1, {}),
        (1, {"fc_bias": True}),
        (3, {}),
        (3, {"norm_before_residual": True}),
        (3, {"attention_bias": True}),
        (3, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
@torch.inference_mode()
def test_same_results(version: int, changes: dict[str, object]) -> None:
    target = adapted(0)
    config = replace(random_head(target, version).config, **changes)
    ids = None if version == 1 else list(range(3, 3 + config.draft_vocab_size))
    torch.manual_seed(0)
    head = EagleHead(config, ids, target.hf.get_output_embeddings()).eval()
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    plain = copy.deepcopy(head)
    plain.__dict__["target_head"] = target.hf.get_output_embeddings()
    lean = quicken(head, 64)
    assert isinstance(lean, LeanEagle)
    embeds = torch.randn(6, config.hidden_size)
    features = torch.randn(6, config.target_hidden_size * len(config.feature_layers))
    positions = torch.tensor([0, 1, 2, 30, 31, 63])
    hidden = plain(embeds, plain.fuse(features), positions, dense_attention)
    quick = lean(embeds, lean.fuse(features), positions, dense_attention)
    torch.testing.assert_close(quick, hidden, rtol=1e-4, atol=1e-4)
    expected = plain.expand(plain.logits(hidden))
    torch.testing.assert_close(lean.expand(lean.logits(quick)), expected, rtol=1e-4, atol=1e-4)
