"""Which models the kernels take: by class, by configuration, and by a trial."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from random_models import COMMON

from paceline.core.batch import Batch, ModelOutput
from paceline.model.backends.base import trial_logits
from paceline.model.backends.native import model as using
from paceline.model.backends.native.recognise import (
    as_rms_norm,
    describe_decoder,
    unsupported_option,
)
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.segments import FULL
from paceline.model.probe import register
from paceline.model.target import CausalModel

YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
}


def built(kind: str, **changes: Any) -> CausalModel:
    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | changes)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="paceline")
    return CausalModel(hf.eval(), kind.lower())


def scaled(beta: float) -> CausalModel:
    return built("Ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": beta})


@pytest.mark.parametrize(
    "model, option",
    [
        (built("Llama"), None),
        (built("Mistral", rope_parameters=YARN), None),
        (built("Granite", residual_multiplier=0.5, logits_scaling=6.0), None),
        (built("Llama", hidden_act="gelu_new"), None),
        (built("Qwen3Moe", norm_topk_prob=False), "norm_topk_prob = False"),
        (scaled(0.0), None),
        (scaled(0.5), None),
    ],
    ids=["llama", "yarn", "granite", "gelu", "experts", "without scale", "scale"],
)
def test_options_that_the_kernels_do_not_have(model: CausalModel, option: str | None) -> None:
    assert unsupported_option(model.hf) == option
    assert model.use_backend("native") == (option is None)
    assert model.backend_refusal == (option and f"the kernels do not have {option}")


@pytest.mark.parametrize(
    "rope, reason",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic depends on the length"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "turns 4 of 8"),
    ],
    ids=["dynamic", "partial"],
)
def test_rotary_embeddings_that_the_kernels_do_not_have(rope: dict[str, Any], reason: str) -> None:
    hf = built("Llama").hf
    config = copy.deepcopy(hf.config)
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
    shape = (hf.config.num_key_value_heads, 8, 8)
    assert reason in str(describe_decoder(hf, [shape], [FULL] * len(hf.model.layers)))


def test_a_class_of_that_name_from_elsewhere() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """As a checkpoint's own code might bring one."""

    model = built("Llama")
    model.hf.__class__ = LlamaForCausalLM
    assert not model.use_backend("native")
    assert model.backend_refusal == "LlamaForCausalLM is no decoder of a known shape"


def test_norms_are_those_of_their_modules() -> None:
    x = torch.randn(2, 5, 32) * 0.02
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm(32, eps=1e-3)
    gemma = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(32)
    for module, dtype in ((llama, x.dtype), (gemma, x.dtype), (gemma, torch.bfloat16)):
        module.weight.data.normal_()
        norm, rows = as_rms_norm(module.to(dtype), gemma=module is gemma), x.to(dtype)
        assert norm is not None
        made = torch.rms_norm(rows.float(), (32,), norm.weight.float(), norm.eps)
        torch.testing.assert_close(made.to(dtype), module(rows))
    for foreign in (torch.nn.LayerNorm(32), torch.nn.RMSNorm(32)):  # the latter has no epsilon
        assert as_rms_norm(foreign, gemma=False) is None


class Doubled(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Called an RMS norm, and another function."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


def test_a_norm_that_computes_something_else_is_found_by_the_trial() -> None:
    model = built("Llama")
    model.hf.model.norm.__class__ = type("LlamaRMSNorm", (Doubled,), {})
    assert not model.use_backend("native")
    assert model.backend_refusal is not None and "% off" in model.backend_refusal


class Further:
    """The kernels, but wrong for rows of some positions."""

    def __init__(self, native: Any, wrong: range) -> None:
        self._native, self._wrong = native, wrong

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        out = self._native(batch, cache)
        for row, position in enumerate(batch.positions):
            if position in self._wrong:
                out.logits[row] = out.logits[row].flip(0)
        return out


@pytest.mark.parametrize("wrong", [range(8), range(50, 72), range(116, 128)])
def test_kernels_that_are_wrong_in_one_part_of_the_context_are_not_used(
    wrong: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = using.NativeModel
    monkeypatch.setattr(using, "NativeModel", lambda *given: Further(real(*given), wrong))
    model = built("Llama")
    assert not model.use_backend("native") and model.backend.name == "reference"
    assert model.backend_refusal is not None and "% off" in model.backend_refusal


def test_a_trial_has_rows_of_several_sequences_near_and_far() -> None:
    model, seen = built("Llama"), list[Batch]()

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
            seen.append(batch)
            return model(batch, cache)

    with torch.inference_mode():
        assert [part.shape for part in trial_logits(Noted())] == [(8, 61)] * 3
    places = [[*seen[0].positions[s.start : s.start + s.rows]] for s in seen[0].spans]
    assert places == [[*range(8)], [*range(56, 64)], [*range(120, 128)]]
