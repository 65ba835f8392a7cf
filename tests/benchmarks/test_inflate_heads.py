"""Inflated heads say what the small ones say, to the target that was inflated with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inflate import InflateError, Shape, Sizes, inflate, positions, read_shape, wider
from inflate_heads import inflate_heads, pad_eagle, pad_medusa
from paceline.core.params import SamplingParams
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, load_eagle, save_eagle
from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads
from paceline.draft.spec import TargetShape
from paceline.errors import ModelLoadError
from paceline.llm import LLM
from support.engine_models import write_pair
from support.medusa_models import write_medusa

SMALL = Shape(hidden=32, layers=2, ffn=48, heads=4, kv_heads=2, head_dim=8)
SIZES = Sizes(hidden=128, layers=5, ffn=112)
BIG = wider(SMALL, SIZES)
PROMPTS: list[str | list[int]] = ["Once upon a time there was", [5, 9, 5, 9, 5]]


def eagle(version: int, vocab: int = 60, **changes: Any) -> EagleHead:
    values: dict[str, Any] = {
        "version": version,
        "hidden_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
        "vocab_size": vocab,
        "target_hidden_size": 32,
        "target_layers": 2,
        "feature_layers": (0, 1, 2) if version == 3 else (2,),
        "draft_vocab_size": 30 if version == 3 else vocab,
        "max_positions": 160,
        "rms_norm_eps": 1e-3,  # large, so that a forgotten rescaling shows
        "fc_bias": version == 1,
    }
    with torch.random.fork_rng():
        torch.manual_seed(version)
        config = EagleConfig(**(values | changes))
        head = EagleHead(config, range(0, 60, 2) if version == 3 else None)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.mul_(4.0) if parameter.ndim == 2 else parameter.add_(0.1)
                assert "norm" not in name or not torch.equal(parameter, torch.ones_like(parameter))
    return head.eval()


def dense(query: Any, key: Any, value: Any, *, layer: int, scaling: float) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def blocks(x: torch.Tensor, count: int) -> torch.Tensor:
    """[n, count * 32] as an inflated target gives it: zeros behind each feature."""
    return F.pad(x.unflatten(1, (count, 32)), (0, 96)).flatten(1)


def test_new_layers_lie_between_the_old_ones() -> None:
    assert positions(12, 24) == list(range(0, 24, 2))
    assert positions(2, 5) == [0, 2] and positions(3, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    "head",
    [
        eagle(3),
        eagle(3, norm_before_residual=True, attention_bias=True, has_embedding=True),
        eagle(1),
    ],
    ids=["EAGLE-3", "EAGLE-3 with options", "EAGLE-1"],
)
def test_an_inflated_eagle_head_drafts_the_same_tokens(head: EagleHead) -> None:
    big = pad_eagle(head, SMALL, BIG).eval()
    assert big.config.heads > 4 and big.config.ffn_size == 112
    assert big.config.feature_layers == ((0, 2, 5) if head.config.version == 3 else (5,))
    count = len(head.config.feature_layers)
    features, embeds = torch.randn(9, 32 * count), torch.randn(9, 32)
    positions = torch.arange(9)
    with torch.inference_mode():
        hidden = head(embeds, head.fuse(features), positions, dense)
        wide = big.fuse(blocks(features, count))
        got = big(blocks(embeds, 1), wide, positions, dense)
        torch.testing.assert_close(got, blocks(hidden, 1), rtol=1e-3, atol=1e-3)
        if head.config.version == 3:
            torch.testing.assert_close(big.logits(got), head.logits(hidden), rtol=1e-4, atol=1e-3)
            assert torch.equal(big.d2t, head.d2t)
        if head.embed_tokens is not None:
            assert big.embed_tokens is not None
            ids = torch.arange(60)
            assert torch.equal(big.embed_tokens(ids), blocks(head.embed_tokens(ids), 1))


@pytest.mark.parametrize("shared", [True, False])
def test_inflated_medusa_heads_predict_the_same(shared: bool) -> None:
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(32, 60, heads=3, layers=2, shared_head=shared))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    big = pad_medusa(heads, SMALL, BIG)
    features, lm_head = torch.randn(5, 32), torch.randn(60, 32)
    with torch.inference_mode():
        expected = heads(features, lambda x: x @ lm_head.T)
        got = big(blocks(features, 1), lambda x: x @ blocks(lm_head, 1).T)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    new = big.get_submodule("0.0.linear").weight[:32, 32:]
    assert (new == 0).float().mean() < 0.01


def decode(target: str, spec: str) -> tuple[list[list[int]], list[tuple[int, int]], list[Any]]:
    """The texts, (drafted, accepted) for each, and all proposed tokens."""
    llm = LLM(target, spec, dtype="float32", draft_length=3)
    drafter = llm.engine.drafter
    propose, proposed = drafter.propose, []

    def watched(plan: Any) -> Any:
        trees = propose(plan)
        proposed.append([(tree.tokens.tolist(), tree.parents) for tree in trees])
        return trees

    drafter.propose = watched  # type: ignore[method-assign]
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    counts = [(c.stats.drafted_tokens, c.stats.accepted_tokens) for c in done]
    return [c.token_ids for c in done], counts, proposed


@pytest.mark.parametrize(
    "kind", [pytest.param("medusa", marks=pytest.mark.slow), "eagle3", "eagle"]
)
def test_the_engine_drafts_and_accepts_the_same(kind: str, tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path)
    shape = read_shape(json.loads((Path(target) / "config.json").read_text()))
    assert shape == SMALL
    heads = tmp_path / kind
    if kind == "medusa":
        write_medusa(heads, target, layers=2)
    else:
        vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
        save_eagle(eagle(3 if kind == "eagle3" else 1, vocab), heads)
    big = inflate(target, SIZES, tmp_path / "big")
    padded = inflate_heads(heads, target, SIZES, tmp_path / "big-heads")
    small, large = (decode(str(t), f"{kind}:{h}") for t, h in ((target, heads), (big, padded)))
    assert small == large
    assert sum(drafted for drafted, _ in small[1]) > 40
    if kind == "medusa":
        assert sum(accepted for _, accepted in small[1]) >= 3


def test_padded_once_and_refused_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    target, _ = write_pair(tmp_path)
    vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
    save_eagle(eagle(3, vocab), tmp_path / "head")
    folder = inflate_heads(tmp_path / "head", target, SIZES)
    assert folder.parent == tmp_path / "cache" / "inflated"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert inflate_heads(tmp_path / "head", target, SIZES) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert load_eagle(str(folder), TargetShape(128, vocab, 5)).config.target_layers == 5
    save_eagle(eagle(3, vocab, target_layers=7), tmp_path / "other")
    with pytest.raises(ModelLoadError, match="number of layers 7"):
        inflate_heads(tmp_path / "other", target, SIZES)
    save_eagle(eagle(3, vocab, hidden_size=16, has_embedding=True), tmp_path / "narrow")
    with pytest.raises(InflateError, match="only heads of the target's width"):
        inflate_heads(tmp_path / "narrow", target, SIZES)
    assert [p.name for p in (tmp_path / "cache" / "inflated").iterdir()] == [folder.name]
