"""Some layers of a checkpoint through the engine, beside transformers: equal, or found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, Gemma3TextConfig, LlamaConfig

from paceline.lab.doctor import Severity, check_logits, examine
from paceline.lab.doctor.findings import KINDS
from paceline.lab.doctor.logits import _some_layers
from paceline.model import probe
from paceline.model.backends.reference.backend import TorchBackend
from support.doctor_folders import Copy, only
from support.heard_stages import heard
from support.model_folders import write_gpt2
from support.tiny_models import SMALL

ORIGINAL = 64


def write(folder: Path, config: Any) -> str:
    """A random model whose weights are so large that every part affects the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    return str(folder)


def sized(kind: type, **more: Any) -> Any:
    return kind(**SMALL | {"vocab_size": 61, "head_dim": 8, "max_position_embeddings": 512} | more)


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


def longrope() -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 5.0, 7.0]}
    return rope("longrope", **factors, original_max_position_embeddings=ORIGINAL)


# -- healthy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paceline/tiny", "paceline/tiny-draft"])
def test_the_embedded_pair_is_equal(name: str) -> None:
    noticed = check_logits(name)
    assert (noticed.code, noticed.severity) == ("logits-equal", Severity.OK)
    assert "positions 0 to 31, 496 to 527, 992 to 1,023" in noticed.text
    assert "2 layers" in noticed.text


def test_stages_are_reported() -> None:
    with heard() as told:
        check_logits("paceline/tiny")
    assert told.stages[0] == "comparing paceline/tiny with transformers"


def test_learned_positions(tmp_path: Path) -> None:
    noticed = check_logits(write_gpt2(tmp_path))
    assert noticed.code == "logits-equal", noticed.text
    assert "32 to 63 (" in noticed.text


def test_a_prefix_has_each_kind_of_layer(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 4]
    config = sized(Gemma3TextConfig, num_hidden_layers=8, layer_types=kinds, sliding_window=6)
    shorter, layers, _ = _some_layers(config)
    assert (layers, shorter.num_hidden_layers, shorter.layer_types) == (4, 4, kinds[:4])
    assert (config.num_hidden_layers, config.layer_types) == (8, kinds)
    noticed = check_logits(write(tmp_path, config))
    assert noticed.code == "logits-equal" and "(4 layers" in noticed.text, noticed.text


def test_only_the_compared_layers_are_read(copy: Copy) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".layers." in name and int(name.split(".")[2]) > 1:
                tensor[:] = torch.nan

    assert check_logits(str(copy("tiny").tensors(poison))).code == "logits-equal"


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from support.made_gguf import write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, options={"num_hidden_layers": 3})
    noticed = check_logits(str(path))
    assert noticed.code == "logits-equal", noticed.text
    assert "(2 layers" in noticed.text


# -- planted faults --------------------------------------------------------------------------------


def ministral(folder: Path) -> str:
    from transformers import Ministral3Config

    yarn = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL}
    more = {"llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}
    return write(folder, sized(Ministral3Config, **rope("yarn", **yarn, **more)))


def test_a_lost_query_scale_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Ministral's, which begins at the original length, undone on the way to attention."""
    name = ministral(tmp_path)
    assert check_logits(name).code == "logits-equal"
    attend = probe.paged_attention

    def unscaled(query: Any, key: Any, value: Any, layer: int, step: Any, *more: Any) -> Any:
        scale = 1 + 0.1 * torch.log1p((step.batch.positions // ORIGINAL).float())
        return attend(query / scale[:, None], key, value, layer, step, *more)

    monkeypatch.setattr(probe, "paged_attention", unscaled)
    noticed = check_logits(name)
    assert (noticed.code, noticed.severity) == ("logits-differ", Severity.ERROR)
    position = int(noticed.text.partition("position ")[2].partition(" ")[0])
    assert position >= ORIGINAL
    assert noticed.text.startswith("the logits") and "2 layers" in noticed.text
    assert noticed.cure == KINDS["logits-differ"].cure


def test_rope_tables_that_are_too_short_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference's rows, as if what is tried when it is loaded had not seen it."""
    run = TorchBackend.run

    def clamped(self: TorchBackend, batch: Any) -> torch.Tensor:
        return run(self, replace(batch, positions=batch.positions.clamp(max=ORIGINAL)))

    monkeypatch.setattr(TorchBackend, "run", clamped)
    noticed = check_logits("paceline/tiny")
    assert noticed.code == "logits-differ" and noticed.text.startswith("the logits")
    assert noticed.cure == KINDS["logits-differ"].cure


# -- what is not compared --------------------------------------------------------------------------


def test_a_skipped_comparison_gives_the_reason(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("tiny-draft")
    folder.config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    noticed = check_logits(str(folder))
    assert (noticed.code, noticed.severity) == ("logits-unchecked", Severity.NOTE)
    assert "gptq" in noticed.text
    monkeypatch.setattr("paceline.lab.doctor.logits.free_memory", lambda device: 1 << 20)
    noticed = check_logits("paceline/tiny")
    assert noticed.code == "logits-unchecked" and "1.0 MiB of memory are free" in noticed.text


# -- cases that once gave wrong texts: served, or refused by name ----------------------------------


def llama4(folder: Path) -> str:
    from transformers import Llama4TextConfig

    more = {"attention_chunk_size": 6, "floor_scale": 8, "num_local_experts": 2}
    more |= {"intermediate_size_mlp": 40, "layer_types": ["chunked_attention", "full_attention"]}
    return write(folder, sized(Llama4TextConfig, **more, no_rope_layers=[1, 0]))


def transformed(folder: Path) -> str:
    name = write(folder, sized(LlamaConfig))
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    said |= {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))
    return name


def with_key(folder: Path) -> str:
    pytest.importorskip("gguf")
    from support.made_gguf import write_gguf

    path = folder / "model.gguf"
    write_gguf(path, change=lambda writer: writer.add_float32("llama.attention.clamp_kqv", 8.0))
    return str(path)


CASES: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "longrope": (
        lambda folder: write(folder, sized(LlamaConfig, **longrope())),
        "logits-equal",
        "480 to 511 (",
    ),
    "llama4": (llama4, "logits-equal", "positions 0 to 31 ("),
    "transform_config": (transformed, "architecture-refused", "transform_config"),
    "gguf key": (with_key, "architecture-refused", "clamp_kqv"),
    "found by trying it": (
        lambda folder: write(folder, sized(DiffLlamaConfig)),
        "architecture-refused",
        "more than once through the attention interface",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_gives_one_line(case: str, tmp_path: Path) -> None:
    make, code, words = CASES[case]
    name = make(tmp_path)
    findings = [item for item in examine(name) if item.code == code] or [check_logits(name)]
    noticed = only(findings, code)
    assert words in noticed.text and "\n" not in noticed.text
    assert (noticed.severity is Severity.ERROR) == (code == "architecture-refused")
