"""A quantised target's perplexity beside its original's, and what bench and certify tell of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.measuring import PerplexityOptions
from paceline.lab.perplexity import beside_original, perplexity, read_windows, shipped_windows
from paceline.llm import LLM
from paceline.model.loading import load_tokenizer
from paceline.model.target import CausalModel
from support.tiny_models import SENTENCES, TinyPair


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in SENTENCES))
    return file


def test_beside_the_original(tiny_pair: TinyPair, text: Path) -> None:
    tokenizer = load_tokenizer(tiny_pair.target)
    plain = CausalModel.load(tiny_pair.target, "float32", "cpu")
    rounded = CausalModel.load(tiny_pair.target, "float32", "cpu", quantize="int4")
    measured = beside_original(rounded, tokenizer, text, tiny_pair.target)
    windows = read_windows(text, tokenizer, 4096)
    assert measured.theirs == perplexity(plain, windows) and measured.measured == perplexity(
        rounded, windows
    )
    assert measured.rise is not None and math.isfinite(measured.rise) and measured.rise != 0
    assert measured.quantised and f"({measured.rise:+.1%})" in measured.line
    assert measured.record()["rise"] == measured.rise
    alone = beside_original(rounded, tokenizer, None, None, 300)
    assert alone.rise is None and "--original" in alone.line and alone.measured.tokens < 300
    assert "--original" not in beside_original(plain, tokenizer, text, None, 50).line


def test_what_a_cache_in_8_bits_cost(tiny_pair: TinyPair, text: Path) -> None:
    llm = LLM(tiny_pair.target, draft="none", dtype="float32", kv_cache_dtype="int8")
    assert llm.target.numbers == "float32, cache int8"
    measured = PerplexityOptions(str(text)).compared(llm, tiny_pair.target, None, 2000)
    llm.close()
    assert measured.original == tiny_pair.target
    assert measured.rise is not None and measured.rise != 0 and abs(measured.rise) < 5e-3


def test_the_shipped_text_is_cut(tiny_pair: TinyPair) -> None:
    windows = shipped_windows(load_tokenizer(tiny_pair.target), 200)
    assert windows and sum(map(len, windows)) <= 200


def run(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code in (0, 3), result.output
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def test_bench_and_certify_tell_it(tiny_pair: TinyPair, text: Path) -> None:
    model = ["--model", tiny_pair.target, "--dtype", "float32", "--draft", "none"]
    few = ["--per-category", "1", "--category", "code", "--max-tokens", "8", "--allow-idle"]
    options = [*model, "--quantize", "int8", "--perplexity", str(text)]
    (measured,) = run("bench", *options, *few, "--rounds", "1", "--seconds", "0")["perplexity"]
    assert measured["quantised"] and measured["original_model"] == tiny_pair.target
    assert measured["rise"] == pytest.approx(
        measured["target"]["perplexity"] / measured["original"]["perplexity"] - 1
    )
    less = ["--texts", "1", "--prefixes", "1", "--samples", "100", "--max-tokens", "8"]
    draft = ["--model", tiny_pair.target, "--dtype", "float32", "--draft", "ngram"]
    told = run("certify", *draft, "--quantize", "int4", *less)
    assert told["perplexity"]["quantised"] and told["perplexity"]["text"] == "the shipped prompts"
    assert told["perplexity"]["original_model"] == tiny_pair.target


def test_a_text_that_is_not_there_is_refused_first(tiny_pair: TinyPair) -> None:
    for command in ("bench", "certify"):
        words = [command, "--model", tiny_pair.target, "--draft", "ngram"]
        words += ["--perplexity", "nowhere.jsonl"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and "there is no file nowhere.jsonl" in result.output
