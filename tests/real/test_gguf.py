"""The file that SmolLM2-135M-Instruct comes as, a GGUF in Q4_1, beside the pulled model."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.lab.perplexity import perplexity
from paceline.model.loading import load_module
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel


@pytest.fixture(scope="module")
def gguf() -> str:
    file = os.environ.get("PACELINE_TEST_GGUF")
    if not file:
        pytest.skip("name SmolLM2-135M-Instruct.Q4_1.gguf in PACELINE_TEST_GGUF")
    return file


def test_all_blocks_are_kept_and_are_the_pulled_models_numbers(model: str, gguf: str) -> None:
    pulled = load_module(model, "float32", "cpu")
    kept = load_module(gguf, "float32", "cpu", keep_quantised=True)
    layers = {n: m for n, m in kept.named_modules() if isinstance(m, QuantisedLinear)}
    assert len(layers) == 7 * 30 + 1
    for name, layer in layers.items():
        assert torch.equal(layer.weight, pulled.get_submodule(name).weight), name


def test_perplexity_is_that_of_the_dequantised_file(model: str, gguf: str) -> None:
    target = CausalModel.load(gguf, "bfloat16", "cpu")
    assert target.backend.name == "native"
    plain = CausalModel.load(model, "bfloat16", "cpu")
    texts = [[(7919 * n + 11 * k) % 40000 for n in range(60)] for k in range(2)]
    texts.append(list(range(1000, 1200)))
    found, wanted = (perplexity(one, texts).nats for one in (target, plain))
    assert found == pytest.approx(wanted, rel=0.02)
