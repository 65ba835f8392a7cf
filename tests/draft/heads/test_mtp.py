"""MTP layers: read from the layouts of checkpoints, and their logits against the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline import LLM, ModelLoadError, SamplingParams
from paceline.core.batch import Batch, Span
from paceline.draft.auto import Circumstances, compose
from paceline.draft.heads.mtp import MtpStep, load_mtp
from paceline.lab.doctor import examine
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.every_drafter import WEIGHTS
from support.mtp_models import LAYOUTS, deeper, parts_of, write_mtp
from support.tiny_models import SMALL

COMMON = SMALL | {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.25}
COMMON |= {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        EXPERTS | LATENT | {"v_head_dim": 6, "num_key_value_heads": 4},
    ),
    "glm4_moe": ("Glm4MoeConfig", EXPERTS | {"head_dim": 8, "use_qk_norm": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "one layer": ("Qwen3Config", {"head_dim": 8, "num_hidden_layers": 1}),
    "llama": ("LlamaConfig", {}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
}
CASES = [("deepseek_v3", "deepseek"), ("glm4_moe", "deepseek"), ("qwen3", "qwen3_next")]
CASES += [("qwen3", "mimo"), ("llama", "deepseek"), ("qwen3_next", "qwen3_next")]
CASES += [("one layer", "qwen3_next")]


def config_of(kind: str) -> Any:
    import transformers

    name, changes = KINDS[kind]
    return getattr(transformers, name)(**{**COMMON, **changes})


@torch.inference_mode()
def by_the_paper(config: Any, layout: str, embeds: torch.Tensor, hidden: torch.Tensor) -> Any:
    """Outputs ``[T, H]``: formulas 21 to 23 of DeepSeek-V3's report, over a whole text at once; the
    decoder layer is transformers'."""
    parts, eps = parts_of(config), config.rms_norm_eps
    around = 1 if config.model_type == "qwen3_next" else 0  # what its weights are stored without

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + around)

    e, h = norm(embeds, parts["enorm"]), norm(hidden, parts["hnorm"])
    joined = torch.cat((h, e) if layout == "mimo" else (e, h), -1) @ parts["eh_proj"].T
    stack = deeper(config).model
    stack.config.num_hidden_layers = 1
    if getattr(stack.config, "layer_types", None):
        stack.config.layer_types = stack.config.layer_types[-1:]
    stack.layers, stack.norm = nn.ModuleList([stack.layers[-1]]), nn.Identity()
    out = stack(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
    return norm(out, parts["norm"])


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_outputs_are_the_papers(tmp_path: Path, kind: str, layout: str) -> None:
    config = config_of(kind)
    folder = write_mtp(tmp_path / "model", config, layout, whole=True)
    target = CausalModel.load(folder, "float32", "cpu", backend="reference")
    head = load_mtp(folder, target)
    step, count = MtpStep(head, target), 9
    hidden = torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(3, 3 + count)
    with torch.inference_mode():
        embeds = target.embedding("input")(ids)
        wanted = by_the_paper(config, layout, embeds, hidden)
        cache = PagedCache(head.model.cache_shapes, 3, 4, torch.float32, target.device)
        for first, behind in ((0, 5), (5, count)):  # in two forwards
            rows = range(first, behind)
            span = Span(0, 0, first, len(rows))
            tables = ((0, 1, 2),)
            batch = Batch(ids[first:behind].tolist(), list(rows), list(rows), (span,), tables)
            found, logits = step(batch, cache, hidden[first:behind], fused=False)
            torch.testing.assert_close(found, wanted[first:behind], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits, target.head(found))


FLOATS = {"num_bits": 8, "type": "float"}
INTEGERS = {"num_bits": 8, "type": "int", "strategy": "channel"}
BLOCKS = {"strategy": "block", "block_structure": [24, 40]}
FP8, COMPRESSED = {"quant_method": "fp8"}, {"quant_method": "compressed-tensors"}
# quantization_config, the scale's name, and the block that it multiplies; None: all outputs, inputs
FORMS: dict[str, tuple[dict[str, Any], str, tuple[int | None, int | None]]] = {
    "DeepSeek": (FP8 | {"weight_block_size": [24, 40]}, "weight_scale_inv", (24, 40)),
    "one scale": (FP8 | {"activation_scheme": "static"}, "weight_scale", (None, None)),
    "rows": ({"quant_method": "fbgemm_fp8"}, "weight_scale", (1, None)),
    "compressed": (
        COMPRESSED
        | {"format": "float-quantized"}
        | {"config_groups": {"a": {"weights": FLOATS | {"strategy": "channel"}}}},
        *("weight_scale", (1, None)),
    ),
    "compressed blocks": (
        COMPRESSED | {"config_groups": {"a": {"weights": FLOATS | BLOCKS}}},
        *("weight_scale", (24, 40)),
    ),
    "integers": (
        COMPRESSED | {"config_groups": {"a": {"weights": INTEGERS}}},
        *("weight_scale", (1, None)),
    ),
}


def rounded(weight: torch.Tensor, block: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Numbers of ``dtype``, the scales of their blocks, and what they stand for."""
    height, width = (part or size for part, size in zip(block, weight.shape, strict=True))
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    numbers, meant = weight.to(dtype), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for i, j in torch.cartesian_prod(*(torch.arange(size) for size in scales.shape)).tolist():
        part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        scales[i, j] = weight[part].abs().max() / largest
        scaled = weight[part] / scales[i, j]
        numbers[part] = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
        meant[part] = numbers[part].float() * scales[i, j]
    return numbers, scales, meant


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_layer_is_dequantised(tmp_path: Path, form: str) -> None:
    options, scale, block = FORMS[form]
    model = write_mtp(tmp_path / "model", config_of("llama"), whole=True)
    target = CausalModel.load(model, "float32", "cpu", backend="reference")
    folders = [Path(write_mtp(tmp_path / name, target.hf.config)) for name in ("a", "b")]
    tensors = load_file(folders[0] / "model.safetensors")
    wanted, config = dict(tensors), {"quantization_config": options}
    for key, weight in tensors.copy().items():
        if weight.dim() == 2:
            kind = torch.int8 if form == "integers" else torch.float8_e4m3fn
            tensors[key], scales, wanted[key] = rounded(weight, block, kind)
            tensors[key.removesuffix("weight") + scale] = scales
    (folders[0] / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for folder, stored in zip(folders, (tensors, wanted), strict=True):
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    found, meant = (load_mtp(str(folder), target).state_dict() for folder in folders)
    read = [key for key in meant if "embed_tokens" not in key and "lm_head" not in key]
    assert all(torch.equal(found[key], meant[key]) for key in read)
    key = next(key for key in tensors if key.endswith(scale))
    tensors[key] = torch.ones(3, 3)
    save_file(tensors, folders[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"\[3, 3\]"):
        load_mtp(str(folders[0]), target)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("deepseek_v3", "deepseek"), ("glm4_moe", "deepseek"), ("qwen3_next", "qwen3_next")],
)
def test_a_checkpoint_drafts_for_itself(tmp_path: Path, kind: str, layout: str) -> None:
    config = config_of(kind)
    folder = write_mtp(tmp_path / "model", config, layout, whole=True)
    from paceline.model.tokenizer import load_tokenizer

    load_tokenizer("paceline/tiny").save_pretrained(folder)
    plain = LLM(folder, draft="none", dtype="float32")
    prompts, params = [[3, 4, 5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = plain.generate(prompts, params)[0].token_ids
    for draft in ("mtp", "mtp:branching=2x2", "hybrid:suffix+mtp"):
        llm = plain.with_draft(draft, draft_length=2)
        found = llm.generate(prompts, params)[0]
        assert found.token_ids == wanted and found.stats.drafted_tokens > 0
    loaded = LLM(folder, dtype="float32")
    assert "mtp" in loaded.drafts[0] and "mtp (part of the checkpoint)" in loaded.setup_notes[-1]
    codes = {item.code: item.text for item in examine(folder, "mtp")}
    assert "mtp-layer" in codes and "an MTP layer of" in codes["head-fits"]


def test_auto_takes_it_where_the_checkpoint_has_it() -> None:
    bare = Circumstances("any/model", "the device is cuda:0", 16, 512 << 20, 160 << 20, 8 << 30)
    assert "mtp" not in str(compose(bare).spec)
    held = Circumstances(*list(vars(bare).values())[:6], mtp=True)
    assert str(compose(held).spec) == "hybrid:suffix+ngram+mtp"


# -- what cannot be --------------------------------------------------------------------------------


def spoil(folder: str, **changes: torch.Tensor | None) -> None:
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        name = max(name for name in tensors if name.endswith(f"{key}.weight"))  # the last layer's
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enorm": None}, "does not fit the target: enorm is missing"),
        ({"eh_proj": torch.zeros(3, 3)}, r"does not fit the target: eh_proj \[3, 3\]"),
        ({"q_proj": None}, "q_proj.weight is missing"),
        ({"q_proj": torch.zeros(2, 2)}, "q_proj.weight has another shape"),
        ({"shared_head.norm": None}, "model.norm.weight is missing"),
        ({"eh_proj": torch.zeros(64, 128).to(torch.float8_e4m3fn)}, "is quantised"),
    ],
)
def test_other_layers_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    config = config_of("llama")
    folder = write_mtp(tmp_path / "model", config, whole=True)
    target = CausalModel.load(folder, "float32", "cpu", backend="reference")
    spoil(folder, **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_mtp(folder, target)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """One whose header is not sound, and one with a NaN."""
    target = CausalModel.load("paceline/tiny", "float32", "cpu", backend="reference")
    folder = Path(write_mtp(tmp_path / "mtp", target.hf.config))
    file = folder / "model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole.replace(b'"format":"pt"', b'"format":  1 '))
    with pytest.raises(ModelLoadError, match=r"is damaged .*invalid type") as caught:
        load_mtp(str(folder), target)
    assert "\n" not in str(caught.value)
    next(tensor for key, tensor in tensors.items() if "mlp" in key)[3, 2] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match="holds NaN or infinity"):
        load_mtp(str(folder), target)


def test_a_model_without_one_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"paceline/tiny has no MTP layer"):
        LLM("paceline/tiny", "mtp", dtype="float32")
    with pytest.raises(ModelLoadError, match="has no MTP layer"):
        examine("paceline/tiny", "mtp")
    assert Path(WEIGHTS["mtp"]).is_dir() and set(LAYOUTS) == {"deepseek", "qwen3_next", "mimo"}
