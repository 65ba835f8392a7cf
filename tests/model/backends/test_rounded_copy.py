"""Copies of a native model in fewer bits: what is rounded, and to what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import library
from paceline.model.backends.native import copies
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.copies import quantised_copy
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.target import CausalModel
from support.tiny_models import write_tiny_model

try:
    library()
except NativeUnavailableError as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


def test_every_matrix_is_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits_of: list[int] = []

    def noted(weight: torch.Tensor, bits: int, *how: Any) -> Any:
        bits_of.append(bits)
        return round_to_nearest(weight, bits, *how)

    monkeypatch.setattr(copies, "round_to_nearest", noted)
    model = CausalModel.load(str(write_tiny_model(tmp_path / "model")), "bfloat16", "cpu")
    four = quantised_copy(model, "int4")
    assert bits_of.count(4) == 14 and bits_of.count(8) == 1  # the head
    assert quantised_copy(model, "int4") is four and len(bits_of) == 15
    quantised_copy(model, "int8")
    assert bits_of.count(8) == 1 + 15


def test_gate_up_and_head_of_a_copy_have_activations_of_8_bits() -> None:
    modules = quantised_copy(CausalModel.load("paceline/tiny"), "int8").hf.named_modules()
    packed = {name: m.packed.form for name, m in modules if isinstance(m, PackedLinear)}
    wide = {name.rpartition(".")[2] for name, form in packed.items() if form and form.wide}
    assert "lm_head" in packed
    assert wide == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
