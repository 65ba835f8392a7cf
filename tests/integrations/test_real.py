"""The same in float32 on the real model, where it has been pulled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.integrations.transformers import generate
from support import real_model

pytestmark = pytest.mark.slow  # as all of tests/real

DRAFTS = ("eagle3:paceline/smollm2-eagle3", "hybrid:suffix+ngram")


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_model.require()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    prompts = ["The capital of France is", "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), inputs


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_of_the_real_model(batch: tuple[Any, Any], draft: str) -> None:
    model, inputs = batch
    options = {"max_new_tokens": 24, "do_sample": False}
    wanted = model.generate(**inputs, **options)
    speculative = {"custom_generate": generate, "draft": draft, "draft_length": 4}
    assert torch.equal(model.generate(**inputs, **options, **speculative), wanted)
