"""Layers that stay on disk: the same text, plainly and with drafts, and what a step moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.model.offload import plan_offload
from paceline.tools.doctor import examine

pytest.importorskip("accelerate")

PROMPTS = ["Once upon a time", "def add(a, b):\n    return"]
PARAMS = [
    SamplingParams(max_tokens=10, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.9, seed=3, ignore_eos=True),
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 1 << 20, "draft_length": 3}


def said(llm: LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, PARAMS)]


def test_the_text_is_that_of_a_model_in_memory(random_pair: tuple[str, str]) -> None:
    target, draft = random_pair
    expected = said(LLM(target, "none", backend="reference", **OPTIONS))
    away = LLM(target, "none", offload="disk", weights_memory=0, **OPTIONS)
    layer = away.target.hf.model.layers[1].mlp.down_proj
    assert layer.weight.device.type == "meta", "its weights are on the disk"
    (note,) = away.notes
    assert "2 of 2 layers stay on disk" in note
    assert said(away) == expected
    assert said(away.beside(f"tree:{draft},branching=2x1", **drafting())) == expected
    both = away.beside(f"model:{draft}", draft_offload="disk", **drafting())
    assert said(both) == expected


def test_a_draft_may_have_a_device_of_its_own(
    random_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trees are brought to the target: here from a device that only pretends to be another."""
    target, draft = random_pair
    llm = LLM(target, f"tree:{draft},branching=2x1", draft_device="cpu", **OPTIONS)
    moved: list[torch.device] = []
    monkeypatch.setattr(TokenTree, "on", lambda tree, device: moved.append(device) or tree)
    assert said(llm) == said(LLM(target, "none", **OPTIONS))
    assert set(moved) == {llm.target.device}


def drafting() -> dict[str, Any]:
    return {key: value for key, value in OPTIONS.items() if key != "dtype"}


def test_what_a_step_moves_are_the_bytes_of_its_layers(random_pair: tuple[str, str]) -> None:
    """All that the file holds but embedding, head and final norm; less where some layers stay."""
    target = random_pair[0]
    file = Path(target) / "model.safetensors"
    plan = plan_offload(target, "bfloat16", "cpu", "disk", 0)
    assert (plan.layers, plan.away) == (2, 2)
    assert 0.2 * file.stat().st_size < plan.moved < file.stat().st_size - 2 * plan.resident
    half = plan_offload(target, "bfloat16", "cpu", "disk", plan.resident + plan.largest)
    assert half.away == 1 and half.moved == plan.moved // 2
    assert half.resident == plan.resident + plan.largest
    everything = plan_offload(target, "auto", "cpu", "disk", None)
    assert (everything.away, everything.moved, everything.in_words()) == (0, 0, "")


def test_doctor_says_what_a_step_moves(random_pair: tuple[str, str]) -> None:
    found = examine(random_pair[0], offload="disk", weights_memory=0, dtype="float32")
    (item,) = (item for item in found if item.code == "weights-offloaded")
    assert "2 of 2 layers stay on disk: every forward moves" in item.found
    assert "offload-idle" in {item.code for item in examine(random_pair[0], offload="disk")}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": "cpu"}, "the weights are in its memory already; use disk"),
        ({"offload": "disk", "quantize": "int8"}, "quantize='int8' lays all weights out"),
        ({"offload": "disk", "backend": "native"}, "backend='native' lays all weights out"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(
    random_pair: tuple[str, str], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(random_pair[0], "none", device="cpu", **options)
