"""Perplexity as the engine computes it, of weights and of a cache in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab.perplexity import perplexity, read_windows, shipped_windows
from paceline.llm import LLM
from paceline.model.loading import load_tokenizer
from paceline.model.target import CausalModel
from support.tiny_models import SENTENCES, TinyPair


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in SENTENCES))
    return file


def test_what_a_cache_in_8_bits_cost(tiny_pair: TinyPair, text: Path) -> None:
    llm = LLM(tiny_pair.target, draft="none", dtype="float32", kv_cache_dtype="int8")
    assert llm.target.dtype_text == "float32, cache int8"
    windows = read_windows(text, load_tokenizer(tiny_pair.target), 2000)
    coded = perplexity(llm.target, windows)
    llm.close()
    plain = perplexity(CausalModel.load(tiny_pair.target, "float32", "cpu"), windows)
    rise = coded.value / plain.value - 1
    assert coded.tokens == plain.tokens and rise != 0 and abs(rise) < 5e-3


def test_the_shipped_text_is_cut(tiny_pair: TinyPair) -> None:
    windows = shipped_windows(load_tokenizer(tiny_pair.target), 200)
    assert windows and sum(map(len, windows)) <= 200
