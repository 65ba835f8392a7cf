"""Packing a model changes its speed and memory, not its answers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from paceline.core.batch import Batch, Span
from paceline.model.backends.reference.norms import as_rms_norm
from paceline.model.backends.reference.prepack import optimise, prepack_modules
from paceline.model.backends.reference.products import MergedPart, PrepackedLinear, can_prepack
from paceline.model.backends.reference.recognise import is_llama_shaped, relative_error
from paceline.model.paged.cache import PagedCache
from paceline.model.probe import ATTENTION, register
from paceline.model.target import CausalModel

VOCAB = 320
needs_bf16 = pytest.mark.skipif(
    not can_prepack(torch.empty(8, 8, dtype=torch.bfloat16)),
    reason="this processor has no bf16 products, so nothing is packed",
)

LLAMA_SHAPED = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
OTHERS = {
    "gemma2": ("Gemma2", {"final_logit_softcapping": 5.0}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "smollm3": (  # its second layer has no rotary embedding
        "SmolLM3",
        {"no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
}


def build(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A small random model whose parts all matter: no weight is near 0, no norm weight 1."""
    register()
    name, extra = (LLAMA_SHAPED | OTHERS)[kind]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        attn_implementation=ATTENTION,
        **{**({} if kind == "gpt2" else sizes), **extra, **changes},
    )
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for path, parameter in module.named_parameters():
        if "norm" in path or "ln_" in path:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.dim() == 1:
            parameter.data.normal_(0, 0.3)
        elif "embed" not in path and "wte" not in path:
            parameter.data.normal_(0, 0.12)
    return module.to(dtype).eval()


def logits_of(model: CausalModel, features: tuple[int, ...] = ()) -> Any:
    """A prefill, then a step with a branching draft, as (logits, features) of both."""
    cache = PagedCache(model.cache_shapes, 4, 16, model.dtype, model.device)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (23,), generator=generator).tolist()
    prompt = Batch(ids[:18], range(18), range(18), (Span(0, 0, 0, 18),), ([0, 1],))
    span = Span(0, 0, 18, 1, (-1, 0, 0, -1))
    rows = [0, 1, 2, 4]
    step = Batch(ids[18:], span.positions, range(18, 23), (span,), ([0, 1],), rows)
    with torch.inference_mode():
        first, second = model(prompt, cache, features), model(step, cache, features)
    kept = [torch.cat((first.features[n], second.features[n])).float() for n in features]
    return torch.cat((first.logits, second.logits)).float(), kept


@pytest.mark.parametrize("kind", LLAMA_SHAPED)
def test_lean_forward_equals_the_module_in_float32(kind: str) -> None:
    model = CausalModel(build(kind, torch.float32), kind)
    wanted, wanted_features = logits_of(model, (0, 1, 3))
    optimise(model)
    assert model.lean is not None
    got, features = logits_of(model, (0, 1, 3))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for feature, expected in zip(features, wanted_features, strict=True):
        torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-4)


@needs_bf16
@pytest.mark.parametrize("kind", [*LLAMA_SHAPED, *OTHERS])
def test_packed_bf16_is_as_close_to_float32_as_the_module(kind: str) -> None:
    model = CausalModel(build(kind, torch.bfloat16), kind)
    exact = CausalModel(build(kind, torch.bfloat16).float(), kind)
    truth, _ = logits_of(exact)
    plain, _ = logits_of(model)
    optimise(model)
    assert (model.lean is not None) == (kind in LLAMA_SHAPED)
    prepacked, _ = logits_of(model)
    assert relative_error(prepacked, truth) < 1.5 * relative_error(plain, truth) + 2e-3
    same = prepacked.argmax(-1) == plain.argmax(-1)
    near = plain.gather(1, prepacked.argmax(-1, True)) > plain.amax(-1, True) - 0.1 * plain.std()
    assert bool((same[:, None] | near).all()) and same.float().mean() > 0.7


@needs_bf16
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_features_of_a_packed_model(kind: str) -> None:
    model = CausalModel(build(kind, torch.bfloat16), kind)
    _, wanted = logits_of(model, (0, 2, 3))
    optimise(model)
    _, features = logits_of(model, (0, 2, 3))
    for feature, expected in zip(features, wanted, strict=True):
        assert relative_error(feature, expected) < 0.05


@pytest.mark.parametrize("kind", OTHERS)
def test_other_structures_are_not_taken_for_llama(kind: str) -> None:
    assert not is_llama_shaped(build(kind, torch.float32))


def test_a_difference_in_one_layer_or_at_the_ends_is_seen() -> None:
    hf = build("llama", torch.float32)
    assert is_llama_shaped(hf)
    hf.model.layers[1].mlp.act_fn = torch.nn.GELU()
    hf.model.layers[1].mlp.kind = "gelu"
    assert not is_llama_shaped(hf)
    hf = build("llama", torch.float32)
    inner = hf.lm_head.forward
    hf.lm_head.forward = lambda x: 30 * torch.tanh(inner(x) / 30)
    assert not is_llama_shaped(hf)


@pytest.mark.parametrize("kind", ["llama-bias", "qwen3"])
def test_padding_rows_changes_nothing(kind: str) -> None:
    model = CausalModel(build(kind, torch.float32), kind)
    optimise(model)
    assert model.lean is not None and model.lean.least_rows == 1  # small: stays in the caches
    wanted, wanted_features = logits_of(model, (0, 2, 3))
    model.lean = replace(model.lean, least_rows=9)  # the step has 5 rows, of which 4 have logits
    got, features = logits_of(model, (0, 2, 3))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for feature, expected in zip(features, wanted_features, strict=True):
        torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-4)


@needs_bf16
def test_packing_frees_the_plain_weights_and_keeps_a_tied_embedding() -> None:
    hf = build("llama", torch.bfloat16)
    attention, mlp = hf.model.layers[0].self_attn, hf.model.layers[0].mlp
    gone = [attention.q_proj, attention.k_proj, attention.o_proj, mlp.up_proj, mlp.down_proj]
    weights = [weakref.ref(linear.weight) for linear in gone]
    dense = [linear.weight.detach().clone() for linear in gone]
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    embedding = hf.model.embed_tokens.weight.detach().clone()
    del gone, attention, mlp
    prepack_modules(hf)
    assert all(weight() is None for weight in weights)
    attention, mlp = hf.model.layers[0].self_attn, hf.model.layers[0].mlp
    now = [attention.q_proj, attention.k_proj, attention.o_proj, mlp.up_proj, mlp.down_proj]
    for linear, before in zip(now, dense, strict=True):
        assert isinstance(linear, PrepackedLinear | MergedPart)
        assert torch.equal(linear.weight, before)
    assert torch.equal(hf.model.embed_tokens.weight, embedding)
    assert torch.equal(hf.lm_head.weight, embedding)


@needs_bf16
def test_weights_are_freed_one_by_one_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = build("llama", torch.bfloat16)
    first = [weakref.ref(p) for n, p in hf.named_parameters() if "layers.0" in n and p.dim() == 2]
    alive: list[int] = []

    class Watched(PrepackedLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__(weight, bias)
            alive.append(sum(ref() is not None for ref in first))

    monkeypatch.setattr("paceline.model.backends.reference.prepack.PrepackedLinear", Watched)
    prepack_modules(hf)
    assert len(first) == 7 and alive[0] == 7
    assert alive[-1] == 0  # long before the last layer's


@needs_bf16
def test_packing_twice_changes_nothing() -> None:
    model = CausalModel(build("qwen2", torch.bfloat16), "qwen2")
    optimise(model)
    lean = model.lean
    wanted, _ = logits_of(model)
    optimise(model)
    assert prepack_modules(model.hf) == 0
    assert model.lean is lean
    assert torch.equal(logits_of(model)[0], wanted)


def test_float16_is_not_packed() -> None:
    hf = build("gpt2", torch.float16)
    assert prepack_modules(hf) == 0
    assert not any(isinstance(module, PrepackedLinear) for module in hf.modules())


def test_the_lean_forward_of_plain_weights_stores_none_twice() -> None:
    model = CausalModel(build("llama", torch.float16), "llama")
    wanted, _ = logits_of(model)
    optimise(model)
    assert model.lean is not None
    assert relative_error(logits_of(model)[0], wanted) < 0.01
    mlp = model.hf.model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


@needs_bf16
def test_merged_parts_answer_right_in_any_order_and_for_any_input() -> None:
    hf = build("qwen2", torch.bfloat16)
    plain = build("qwen2", torch.bfloat16).model.layers[0].self_attn
    prepack_modules(hf)
    merged = hf.model.layers[0].self_attn
    x, y = torch.randn(2, 3, 64).bfloat16().unbind()
    with torch.inference_mode():
        for name, z in [("k", x), ("v", y), ("q", x), ("q", x), ("k", y), ("v", x), ("v", y)]:
            got = getattr(merged, f"{name}_proj")(z)
            torch.testing.assert_close(got, getattr(plain, f"{name}_proj")(z), rtol=0.02, atol=0.02)


class _Scaled(torch.nn.Module):
    """An RMS norm that also doubles: same attributes, other function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.rms_norm(x, (32,), self.weight, self.eps)


def test_norms_are_recognised_by_what_they_compute() -> None:
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm(32, eps=1e-3)
    llama.weight.data.normal_()
    norm = as_rms_norm(llama)
    assert norm is not None
    x = torch.randn(2, 5, 32) * 0.02
    torch.testing.assert_close(norm(x), llama(x))
    gemma = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(32)
    gemma.weight.data.normal_()
    norm = as_rms_norm(gemma)
    assert norm is not None
    torch.testing.assert_close(norm(x), gemma(x))
    gemma.bfloat16()
    norm = as_rms_norm(gemma)
    assert norm is not None
    assert torch.equal(norm(x.bfloat16()), gemma(x.bfloat16()))
    assert as_rms_norm(torch.nn.LayerNorm(32)) is None
    assert as_rms_norm(_Scaled()) is None
