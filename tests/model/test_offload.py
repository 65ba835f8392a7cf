"""Layers that stay on disk: the same text, plainly and with drafts, and what a step moves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams, build
from paceline.core.tree import TokenTree
from paceline.draft import auto
from paceline.draft.selfspec import SelfDrafter
from paceline.errors import ConfigError, WriteError
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import library
from paceline.lab.doctor import examine
from paceline.model.copies import quantised_copy
from paceline.model.offload import plan_offload
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel

try:
    library()
    KERNELS = True
except NativeUnavailableError:
    KERNELS = False

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
    (note,) = away.setup_notes
    assert "2 of 2 layers stay on disk" in note
    assert said(away) == expected
    assert said(away.with_draft(f"tree:{draft},branching=2x1", **drafting())) == expected
    both = away.with_draft(f"model:{draft}", draft_offload="disk", **drafting())
    assert said(both) == expected
    assert both.setup_notes == away.with_draft("none", draft_offload="disk").setup_notes == ()
    for several in ("ngram", ["ngram", "hybrid:ngram+suffix"], "auto"):
        *_, said_so = away.with_draft(several, draft_offload="disk", **drafting()).setup_notes
        assert said_so.startswith("draft_offload=disk: no effect")


def counted(llm: LLM) -> list[int]:
    """A number more for each forward of its target."""
    forwards: list[int] = []

    def note(*_: Any) -> None:
        forwards.append(1)

    llm.target.hf.register_forward_pre_hook(note)
    return forwards


def dense(model: CausalModel) -> dict[str, torch.Tensor]:
    named = model.hf.named_modules()
    return {n: m.weight.float() for n, m in named if n.endswith(("proj", "lm_head"))}


@pytest.mark.parametrize("kept", [0, 1], ids=["all layers on disk", "one of two"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_its_form_in_four_bits_is_at_hand_and_is_that_of_a_model_in_memory(
    random_pair: tuple[str, str], backend: str, kept: int
) -> None:
    target = random_pair[0]
    here = CausalModel.load(target, "float32", "cpu", backend="reference")
    plan = plan_offload(target, "float32", "cpu", "disk", 0)
    memory = kept * (plan.resident_bytes + plan.largest_layer_bytes)
    how: dict[str, Any] = {"backend": backend, "offload": "disk", "weights_memory": memory}
    away = CausalModel.load(target, "float32", "cpu", **how)
    copied, wanted = quantised_copy(away, "int4"), quantised_copy(here, "int4")
    assert all(p.device.type == "cpu" for p in copied.hf.parameters()), "all of it is in memory"
    assert not any(hasattr(module, "_hf_hook") for module in copied.hf.modules())
    assert (copied.backend.name == "native") == (KERNELS and backend == "auto")
    weights = dense(copied)
    assert weights.keys() == dense(wanted).keys() and len(weights) == 15
    assert all(torch.equal(weights[name], weight) for name, weight in dense(wanted).items())
    norms = [dict(t.hf.named_parameters()) for t in (copied, wanted)]
    assert all(torch.equal(norms[0][n], norm) for n, norm in norms[1].items() if "norm" in n)
    down = away.hf.model.layers[1].mlp.down_proj
    assert down.weight.device.type == "meta" and not isinstance(down, QuantisedLinear)


@pytest.mark.parametrize("spec", ["quantized:int4", "quantized:int8", "auto"])
def test_a_draft_in_fewer_bits_of_a_target_on_disk(
    random_pair: tuple[str, str], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text stays, and one pass over the disk checks several tokens."""
    monkeypatch.setattr(auto, "_MIN_BYTES", 0)
    target = random_pair[0]
    plain = LLM(target, "none", backend="reference", **OPTIONS)
    away = LLM(target, "none", offload="disk", weights_memory=0, **OPTIONS)
    forwards = counted(away)
    drafted = away.with_draft(spec, **drafting())
    if spec == "auto" and KERNELS:
        assert drafted.drafts == ("hybrid:suffix+ngram+quantized:int4",)
    forwards.clear()
    assert said(drafted) == said(plain)
    if spec == "quantized:int8":  # of random weights, what is rounded to 4 bits is seldom right
        assert len(forwards) < 10


def test_chains_go_on_longer_where_a_step_reads_the_disk(random_pair: tuple[str, str]) -> None:
    here = LLM(random_pair[0], "quantized:int4", **OPTIONS).engine.drafter
    how: dict[str, Any] = {"offload": "disk", "weights_memory": 0}
    away = LLM(random_pair[0], "quantized:int4", **how, **OPTIONS).engine.drafter
    assert isinstance(here, SelfDrafter) and isinstance(away, SelfDrafter)
    assert away.min_level_prob < here.min_level_prob


def test_starting_reads_the_disk_few_times(
    random_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = LLM(random_pair[0], "none", offload="disk", weights_memory=0, **OPTIONS)
    forwards = counted(away)
    monkeypatch.setattr(build, "_SECONDS_PER_BATCH_SIZE", 0.0)
    away.with_draft("ngram", kv_cache_memory=1 << 20)
    assert 0 < len(forwards) <= 8


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


def test_a_cache_folder_that_cannot_be_written_to(
    random_pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(WriteError, match="cannot write offloaded weights"):
        CausalModel.load(random_pair[0], "float32", "cpu", offload="disk", weights_memory=0)


def test_what_a_step_moves_are_the_bytes_of_its_layers(random_pair: tuple[str, str]) -> None:
    """All that the file holds but embedding, head and final norm; less where some layers stay."""
    target = random_pair[0]
    file = Path(target) / "model.safetensors"
    plan = plan_offload(target, "bfloat16", "cpu", "disk", 0)
    assert (plan.layers, plan.offloaded) == (2, 2)
    assert (
        0.2 * file.stat().st_size < plan.moved_bytes < file.stat().st_size - 2 * plan.resident_bytes
    )
    half = plan_offload(
        target, "bfloat16", "cpu", "disk", plan.resident_bytes + plan.largest_layer_bytes
    )
    assert half.offloaded == 1 and half.moved_bytes == plan.moved_bytes // 2
    assert half.resident_bytes == plan.resident_bytes + plan.largest_layer_bytes
    everything = plan_offload(target, "auto", "cpu", "disk", None)
    assert (everything.offloaded, everything.moved_bytes) == (0, 0)


def test_doctor_says_what_a_step_moves(random_pair: tuple[str, str]) -> None:
    findings = examine(random_pair[0], offload="disk", weights_memory=0, dtype="float32")
    (item,) = (item for item in findings if item.code == "weights-offloaded")
    assert "2 of 2 layers stay on disk: every forward moves" in item.text
    assert "offload-idle" in {item.code for item in examine(random_pair[0], offload="disk")}


def test_doctor_says_what_auto_takes_and_how_often_the_target_that_is(
    random_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_MIN_BYTES", 0)
    how: dict[str, Any] = {"offload": "disk", "weights_memory": 0, "dtype": "float32"}
    texts = {item.code: item.text for item in examine(random_pair[0], "auto", **how)}
    away = LLM(random_pair[0], "auto", offload="disk", weights_memory=0, **OPTIONS)
    taken = away.setup_notes[-1].partition(";")[0]
    assert taken.startswith("draft auto: ") and taken in texts["draft-auto"]
    if KERNELS:
        assert "quantized:int4" in taken
    draft = {item.code: item.text for item in examine(random_pair[0], "quantized:int4", **how)}
    assert re.search(r"together 1\.\d\d times as much$", draft["draft-own-weights"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": "cpu"}, "the weights are in its memory already; use disk"),
        ({"offload": "disk", "quantize": "int8"}, "quantize='int8' lays all weights out"),
        ({"offload": "disk", "backend": "native"}, "backend='native' lays all weights out"),
        ({"weights_memory": "1G"}, "give offload as well"),  # it was ignored
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(
    random_pair: tuple[str, str], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(random_pair[0], "none", device="cpu", **options)
