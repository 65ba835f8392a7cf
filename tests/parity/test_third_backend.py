"""A backend of 160 lines (examples/custom_backend.py) drafts with all that there is: the text of
every drafter, tree, head and view is plain decoding's, token for token."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from paceline import LLM, ConfigError, SamplingParams, register_backend
from paceline.model.backends import base
from paceline.model.backends.base import relative_error, trial_logits
from paceline.model.target import CausalModel
from support.every_drafter import SPECS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_backend.py"
PROMPTS = [
    "Once upon a time, there was a little fox who lived in the woods.",
    "The cat sat on the mat. The cat sat on the mat. The cat",
]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def numpy_backend() -> None:
    register_backend("numpy", runpy.run_path(str(EXAMPLE))["make"])


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for params in (GREEDY, SEEDED) for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    llm = LLM("paceline/tiny", draft="none", dtype="float32", backend="numpy", max_batch_size=1)
    assert llm.target.backend_reason == "numpy"
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def plain(alone: LLM) -> list[list[int]]:
    return texts(alone)


@pytest.mark.parametrize("name", SPECS)
def test_every_drafter_writes_what_plain_decoding_writes(
    name: str, alone: LLM, plain: list[list[int]]
) -> None:
    llm = alone.with_draft(SPECS[name], draft_length=4, max_batch_size=4)
    assert texts(llm) == plain
    llm.close()


@torch.inference_mode()
def test_its_logits_are_those_of_the_modules() -> None:
    model = CausalModel.load("paceline/tiny", "float32", "cpu", backend="reference")
    wanted = trial_logits(model)
    assert model.use_backend("numpy")
    for got, right in zip(trial_logits(model), wanted, strict=True):
        assert relative_error(got, right) < 1e-4
    hidden = torch.randn(2, model.hidden_size)
    assert relative_error(model.head(hidden), model.reference.head(hidden)) < 1e-4


def test_what_it_does_not_know_runs_on_the_reference(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = CausalModel.load(str(tmp_path), "float32", "cpu", backend="numpy")
    assert model.backend_reason == "reference (GPT2LMHeadModel is no Llama)"


def test_names_are_taken_once_and_unknown_ones_are_said() -> None:
    with pytest.raises(ConfigError, match="there is a backend 'native' already"):
        register_backend("native", lambda model: "never")
    with pytest.raises(ConfigError, match="backend 'jax' is not known; use one of auto, native"):
        CausalModel.load("paceline/tiny", backend="jax")


def test_what_a_backend_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: CausalModel) -> str:
        raise KeyError("q_proj\nof layer 3")

    monkeypatch.setitem(base._registered, "broken", make)
    with pytest.raises(ConfigError, match=r"backend 'broken' fails .*KeyError.*q_proj") as caught:
        CausalModel.load("paceline/tiny", backend="broken")
    assert "\n" not in str(caught.value)
