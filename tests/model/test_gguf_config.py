"""What a GGUF file's metadata says beyond sizes: read into the config, or refused by its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams, UnsupportedModelError
from paceline.model.loading import load_module, read_config
from support.made_gguf import (
    CONTEXT,
    LAYERS,
    WIDTH,
    skip_where_scores_are_needed,
    write_gguf,
)

gguf = pytest.importorskip("gguf")

PROMPT = [(7 * n * n + 11) % 250 + 4 for n in range(150)]  # longer than every "original" below
HALF = WIDTH // 2


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **options}}


# The models of the field that have it, by what is small of them here.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1": (
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3-yarn": ("qwen3", rope("yarn", factor=8.0, original_max_position_embeddings=32)),
    "qwen3-of-other-heads": ("qwen3", {"head_dim": 32}),
    "starcoder2-theta": ("starcoder2", rope("default")),
    "phi-4": ("phi3", rope("default", partial_rotary_factor=0.75)),
    "phi-3-mini": ("phi3", {**rope("default"), "sliding_window": 24}),
    "gemma-2-9b": ("gemma2", {"query_pre_attn_scalar": WIDTH, "sliding_window": 20}),
    "gemma-2-27b": (
        "gemma2",
        {
            "num_hidden_layers": 46,
            "query_pre_attn_scalar": 16,
            "head_dim": 32,
            "attn_logit_softcapping": 30.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma-3-4b": (
        "gemma3",
        {
            "num_hidden_layers": 8,
            "query_pre_attn_scalar": WIDTH,
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma-3-27b": (
        "gemma3",
        {"num_hidden_layers": 62, "query_pre_attn_scalar": 16, "head_dim": 32},
    ),
    "gemma-3-with-a-final-cap": (
        "gemma3",
        {"query_pre_attn_scalar": WIDTH, "final_logit_softcapping": 15.0},
    ),
}


# Of so many layers as nothing else says.
DEEP = ("gemma-2-27b", "gemma-3-27b")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in DEEP else ()) for c in sorted(CASES)]
)
def test_what_the_file_says_is_the_model(case: str, tmp_path: Path) -> None:
    """The logits of the module that the file was made of, and the engine's text is its text."""
    architecture, options = CASES[case]
    path = tmp_path / "model.gguf"
    module = write_gguf(path, architecture, options={"attn_implementation": "eager", **options})
    read = load_module(str(path), "float32", "cpu", attention="eager")
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.allclose(read(ids).logits, module(ids).logits, atol=2e-4), case
        wanted = module.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    skip_where_scores_are_needed(architecture)
    llm = LLM(str(path), draft="none", dtype="float32")
    (ours,) = llm.generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True))
    assert ours.token_ids == wanted[0][len(PROMPT) :].tolist()


def test_longrope_of_phi_3(tmp_path: Path) -> None:
    """Both lists of factors, the original context, and what scores are multiplied by."""
    original = 64
    stretched = rope(
        "longrope",
        short_factor=[1.0 + n / 8 for n in range(HALF)],
        long_factor=[2.0 + n for n in range(HALF)],
        original_max_position_embeddings=original,
    )
    path = tmp_path / "model.gguf"
    options = {**stretched, "original_max_position_embeddings": original}
    module = write_gguf(path, "phi3", options=options)
    read = load_module(str(path), "float32", "cpu", attention="eager")
    assert read.config.original_max_position_embeddings == original
    found = read.config.rope_parameters
    wanted = module.config.rope_parameters
    assert found["rope_type"] == "longrope" and found["rope_theta"] == 5000.0
    assert found["long_factor"] == wanted["long_factor"]
    assert found["short_factor"] == wanted["short_factor"]
    for length in (40, 150):
        ids = torch.tensor([PROMPT[:length]])
        with torch.inference_mode():
            assert torch.allclose(read(ids).logits, module(ids).logits, atol=2e-4), length


def test_factors_of_ones_stretch_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=lambda w: w.add_tensor("rope_freqs.weight", torch.ones(HALF).numpy()))
    assert read_config(str(path), str(path)).rope_parameters["rope_type"] == "default"


def test_keys_that_gemma_files_may_have(tmp_path: Path) -> None:
    """Newer converters write them; the defaults are those of llama.cpp."""
    path = tmp_path / "model.gguf"

    def change(writer: Any) -> None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)  # gguf 0.17 has no method
        writer.add_float32("gemma3.rope.freq_base_swa", 777.0)
        writer.add_attention_scale(0.125)

    write_gguf(path, "gemma3", change=change, options={"num_hidden_layers": 4})
    config = read_config(str(path), str(path))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 777.0
    assert config.query_pre_attn_scalar == 64

    def listed(writer: Any) -> None:
        writer.add_array("gemma2.attention.sliding_window_pattern", [False, True])

    write_gguf(path, "gemma2", change=listed)
    assert read_config(str(path), str(path)).layer_types == ["full_attention", "sliding_attention"]


# -- refused ---------------------------------------------------------------------------------


def add(method: str, *values: Any) -> Callable[[Any], None]:
    return lambda writer: getattr(writer, method)(*values)


def yarn_with(method: str, *values: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        getattr(writer, method)(*values)

    return change


REFUSED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "llama.made_up_scale": ("llama", add("add_float32", "llama.made_up_scale", 2.0)),
    "llama.logit_scale": ("llama", add("add_logit_scale", 0.5)),
    "llama.embedding_scale": ("llama", add("add_embedding_scale", 12.0)),
    "llama.residual_scale": ("llama", add("add_residual_scale", 0.22)),
    "llama.attention.scale": ("llama", add("add_attention_scale", 0.5)),
    "llama.attention.sliding_window": ("llama", add("add_sliding_window", 32)),
    "llama.attention.temperature_scale": (
        "llama",
        add("add_float32", "llama.attention.temperature_scale", 0.1),
    ),
    "llama.expert_count": ("llama", add("add_expert_count", 8)),
    "qwen2.rope.freq_base_swa": ("qwen2", add("add_float32", "qwen2.rope.freq_base_swa", 77.0)),
    "qwen2.attn_logit_softcapping": ("qwen2", add("add_attn_logit_softcapping", 50.0)),
    "qwen2.attention.value_length": ("qwen2", add("add_uint32", "qwen2.attention.value_length", 8)),
    "llama.rope.scaling.yarn_log_multiplier": (
        "llama",
        yarn_with("add_rope_scaling_yarn_log_mul", 1.0),
    ),
    "llama.rope.scaling.yarn_ext_factor": (
        "llama",
        yarn_with("add_float32", "llama.rope.scaling.yarn_ext_factor", 0.5),
    ),
    "llama.rope.scaling.attn_factor": ("llama", yarn_with("add_rope_scaling_attn_factors", 1.5)),
    "llama.rope.scaling.type": ("llama", add("add_string", "llama.rope.scaling.type", "dynamic")),
}


def refusal(path: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(str(path), draft="none")
    (line,) = str(caught.value).splitlines()
    assert "take the model's own folder" in line
    return line


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_is_not_read_is_named(key: str, tmp_path: Path) -> None:
    architecture, change = REFUSED[key]

    def overwriting(writer: Any) -> None:
        for entries in writer.kv_data:
            entries.pop(key, None)
        change(writer)

    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, change=overwriting)
    assert f"sets {key} to " in refusal(path)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("rope_freqs.weight", torch.linspace(1, 9, HALF), "not those of Llama 3"),
        ("rope_factors_long.weight", torch.ones(HALF), "rope.scaling.type"),
        ("blk.0.attn_q.bias", torch.ones(64), "no weight of the architecture llama"),
        ("blk.1.attn_q_norm.weight", torch.ones(WIDTH), "no weight of the architecture llama"),
    ],
)
def test_a_tensor_that_nothing_takes_is_named(
    name: str, values: torch.Tensor, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=lambda writer: writer.add_tensor(name, values.numpy()))
    line = refusal(path)
    assert said in line and (name in line or "rope" in said)


def test_what_is_no_part_of_the_arithmetic_is_no_reason(tmp_path: Path) -> None:
    """History, authorship, quantisation, and features that a key only denies."""

    def change(writer: Any) -> None:
        writer.add_author("somebody")
        writer.add_string("quantize.imatrix.file", "x.dat")
        writer.add_uint32("somebodys.own.key", 3)
        writer.add_expert_count(0)
        writer.add_causal_attention(True)
        writer.add_rope_scaling_finetuned(True)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(CONTEXT)
        writer.add_attention_scale(WIDTH**-0.5)
        writer.add_tensor("blk.0.attn_rot_embd.weight", torch.ones(HALF).numpy())

    path = tmp_path / "model.gguf"
    write_gguf(path, change=change)
    config = load_module(str(path), "float32", "cpu").config
    assert config.num_hidden_layers == LAYERS
    assert config.rope_parameters["rope_type"] == "default"


def test_parts_of_models_are_named(tmp_path: Path) -> None:
    from paceline import ModelLoadError

    path = tmp_path / "model.gguf"

    def projector(writer: Any) -> None:
        writer.kv_data[0]["general.type"].value = "mmproj"

    write_gguf(path, change=projector)
    with pytest.raises(ModelLoadError, match=r"holds no model \(type mmproj"):
        LLM(str(path), draft="none")
