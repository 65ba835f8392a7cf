"""GGUF's blocks kept as they are: the same numbers as the gguf package gives, and faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ModelLoadError
from paceline.lab.perplexity import perplexity
from paceline.model.copies import quantised_copy
from paceline.model.gguf_weights import weight_of_blocks
from paceline.model.loading import load_module
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel
from support.made_gguf import write_gguf

gguf = pytest.importorskip("gguf")

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
TEXTS = [list(range(10, 150)), [7, 7, 9] * 20]


def random_blocks(kind: str, rows: int, inputs: int) -> np.ndarray[Any, Any]:
    """Bytes of any value, but scales that are numbers."""
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][::-1]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (rows * inputs // count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (rng.random(len(blocks)) * 0.1 - 0.03).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    data = random_blocks(kind, 12, 512)
    weight = weight_of_blocks("blk.0.x", kind, data)
    assert weight.shape == (12, 512)
    wanted = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(weight.dense(), torch.from_numpy(wanted))
    assert weight.has_supported_groups


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused_by_the_tensor(kind: str) -> None:
    data = random_blocks(kind, 12, 512)
    at = HALVES[kind][0]
    data[3, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelLoadError, match=r"a scale of blk\.0\.x is no number \(row 3\)"):
        weight_of_blocks("blk.0.x", kind, data)


def kept(hf: Any) -> dict[str, QuantisedLinear]:
    return {n: m for n, m in hf.named_modules() if isinstance(m, QuantisedLinear)}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_all_layers_are_kept(kind: str, architecture: str, tmp_path: Path) -> None:
    """With rows in transformers' order, and the head of a file that has the embedding for it."""
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, quantisation=kind)
    plain = load_module(str(path), "float32", "cpu")
    layers = kept(load_module(str(path), "float32", "cpu", keep_quantised=True))
    assert len(layers) == 15
    for name, layer in layers.items():
        assert layer.quantised.bits == int(kind[1])
        assert torch.equal(layer.weight, plain.get_submodule(name).weight), name
    assert not kept(plain)


def test_the_model_is_the_dequantised_one_but_for_rounded_activations(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation="Q4_1")
    nats = {
        way: perplexity(CausalModel.load(str(path), "float32", "cpu", **options), TEXTS).nats
        for way, options in {
            "kept": {},
            "read": {"backend": "reference"},
            "none": {"quantize": "none"},
        }.items()
    }
    assert nats["none"] == pytest.approx(nats["read"], rel=1e-5)
    assert nats["kept"] == pytest.approx(nats["read"], rel=1e-2)
    assert nats["kept"] != nats["read"]
    # Rounding it anew, as before, is still had by asking for it.
    again = CausalModel.load(str(path), "float32", "cpu", quantize="int8")
    assert again.hf.lm_head.quantised.bits == 8 if hasattr(again.hf.lm_head, "quantised") else True


def test_what_only_the_reference_runs_is_dequantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "starcoder2", quantisation="Q8_0")
    model = CausalModel.load(str(path), "float32", "cpu")
    assert model.backend.name == "reference"
    assert not kept(model.hf) and not kept(CausalModel.load(str(path), backend="native").hf)
    # What is asked for stays: of the model, and of its copy that drafts.
    for asked in (CausalModel.load(str(path), quantize="int4"), quantised_copy(model, "int4")):
        assert {layer.quantised.bits for layer in kept(asked.hf).values()} == {4, 8}


def test_types_that_cannot_be_kept_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.request.progress import showing

    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation="Q5_0")
    with showing():
        module = load_module(str(path), "float32", "cpu", keep_quantised=True)
    assert not kept(module)
    assert "15 of 15 layers are dequantised: Q5_0 (15)" in capsys.readouterr().err
