"""``paceline recommend``: arithmetic with known prices, forms, memory, and bad input."""

from __future__ import annotations

import json
import struct
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from paceline.control.acceptance import expected_tokens
from paceline.core.costs import CostCurve
from paceline.core.stages import Listener, Stage, listening, stage
from paceline.draft.selfspec import QuantizedDraft
from paceline.lab import recommend as lab
from paceline.lab.doctor.models import skeleton_of
from support.command_lines import assert_one_line, paceline

run = partial(paceline, "recommend")
_BYTE, _ROW, _ADDED = 1e-10, 0.05, 1e-3  # seconds of a byte, a row's share of it, of the engine
_GIB = 2**30
_SLOWER = {"int8": 1.2, "int4": 1.5}  # a byte of a precision, relative to 16 bits


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is known, so that nothing is measured."""
    rows = lab._ROWS

    def curve(precision: str | None) -> CostCurve:
        byte = _BYTE * _SLOWER.get(precision or "", 1.0)
        return CostCurve(rows, tuple(byte * (1 + _ROW * (n - 1)) for n in rows))

    monkeypatch.setattr(lab, "_sample", lambda model, dtype: None)
    monkeypatch.setattr(lab, "_prices", lambda sample, forms, turn: {f: curve(f) for f in forms})
    monkeypatch.setattr(lab, "_added", lambda: _ADDED)


def write_headers(folder: Path, **changes: int) -> Path:
    """A folder of an 8B model, or of one of other sizes, whose weights are a hole behind their
    table."""
    options = dict(
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    )
    config = LlamaConfig(**options | changes)
    config.save_pretrained(folder)
    table, end = {}, 0
    for key, tensor in skeleton_of(config).state_dict().items():
        offsets = [end, end := end + 2 * prod(tensor.shape)]
        table[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    return write_headers(tmp_path)


@pytest.fixture
def few_layers(tmp_path: Path) -> Path:
    """Read sooner, where the size does not matter."""
    return write_headers(tmp_path, num_hidden_layers=2, vocab_size=32000)


def record(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def test_only_what_was_asked_for_is_shown(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch, priced: None
) -> None:
    """It said that it loaded paceline/tiny, which nobody had asked for."""
    seen = []

    class Heard(Listener):
        def begin(self, what: str, total: float | None, unit: str) -> Stage:
            seen.append(what)
            return super().begin(what, total, unit)

    def added() -> float:
        with stage("loading paceline/tiny"):
            return _ADDED

    monkeypatch.setattr(lab, "_added", added)
    with listening(Heard()):
        lab.recommend(str(few_layers), 40 * _GIB)
    assert seen == ["measuring this machine"]


@pytest.mark.usefixtures("priced")
def test_an_8b_model_by_its_headers(headers: Path) -> None:
    answer = record(str(headers), "--memory", "40G")
    forms = {form["name"]: form for form in answer["forms"]}
    assert list(forms) == ["plain", "auto", "8 bits", "4 bits"]
    read = 8_030_261_248 - 4096 * 128256  # an embedding is not read
    widths = {"plain": 2, "8 bits": 1.03 * _SLOWER["int8"], "4 bits": 0.66 * _SLOWER["int4"]}
    for name, width in widths.items():
        expected = 1 / (read * width * _BYTE + _ADDED)
        assert forms[name]["tokens_per_second"] == pytest.approx(expected, rel=0.02)
    assert forms["auto"]["tokens_per_second"] > 1.2 * forms["plain"]["tokens_per_second"]
    assert [form["keeps_text"] for form in forms.values()] == [True, True, False, False]
    sizes = [form["memory_bytes"] / _GIB for form in forms.values()]
    cache = 4096 * 2 * 32 * 8 * 128 * 2 / _GIB
    for size, weights in zip(sizes, (14.96, 19.4, 8.2, 5.6), strict=True):
        assert weights + cache < size < weights + cache + 2.5  # this process is counted
    assert answer["best"] == "auto" and "quantized" in answer["notes"][0]
    rates = [forms[name]["tokens_per_second"] for name in ("4 bits", "auto")]
    assert f"{rates[0] / rates[1]:.1f} times as fast as auto" in answer["notes"][-1]
    assert answer["lines"] == [
        f"paceline chat --model {headers}",
        f"paceline serve {headers}",
        f"llm = paceline.LLM({str(headers)!r})",
    ]


@pytest.mark.usefixtures("priced")
def test_less_memory_than_loading_takes(headers: Path) -> None:
    result = run(str(headers), "--memory", "12G")
    assert result.exit_code == 1
    assert f"paceline quantize {headers} --out FOLDER --to int4" in result.stdout
    assert "nothing fits" in result.stdout and "paceline chat" not in result.stdout
    auto = next(f for f in record(str(headers), "--memory", "20G")["forms"] if f["draft"] == "auto")
    assert auto["fits"] and auto["loading_bytes"] < 20 * _GIB  # without the copy


@pytest.mark.usefixtures("priced")
def test_a_config_is_enough(few_layers: Path) -> None:
    whole = record(str(few_layers), "--memory", "40G")
    (few_layers / "model.safetensors").unlink()
    alone = record(str(few_layers), "--memory", "40G")
    speeds = [[form["tokens_per_second"] for form in answer["forms"]] for answer in (whole, alone)]
    assert speeds[0] == pytest.approx(speeds[1])


def test_a_hiccup_counts_little_and_a_slow_half_counts_half() -> None:
    assert lab._mean([1.0] * 9 + [100.0]) == pytest.approx(1.05)
    assert lab._mean([1.0] * 6 + [1.4] * 5) == pytest.approx((6 + 7) / 11)


def test_the_toy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_SECONDS", 0.5)
    result = run("paceline/tiny")
    assert result.exit_code == 0, result.output
    for words in ("keeps the text", "plain", "auto", "8 bits", "4 bits", "draft auto:"):
        assert words in result.stdout
    assert "paceline chat --model paceline/tiny" in result.stdout


def test_what_is_refused(tmp_path: Path) -> None:
    assert_one_line(run(str(tmp_path / "nothing")), "does not exist; check the path")
    assert_one_line(run(str(tmp_path)), "has no config.json")
    assert_one_line(run("nobody/nothing"), "hub does not deliver it")
    cache = {"PACELINE_CACHE": str(tmp_path)}
    assert_one_line(run("paceline/smollm2", **cache), "run `paceline pull smollm2` once")
    assert run("paceline/tiny", "--memory", "much").exit_code == 2


def test_what_drafts_of_the_four_bit_form_give() -> None:
    """Free passes: all that is accepted of the longest draft. Dear ones: plain decoding. Between:
    more than a draft of any chosen length, as a draft ends where it is unsure."""
    spec = QuantizedDraft()
    step = CostCurve((1, 17), (1.0, 1.0))
    tokens = expected_tokens([spec.acceptance[0], *[spec.acceptance[1]] * 15])

    def rate(seconds: float) -> float:
        return lab._drafted(spec, step, CostCurve((1, 17), (seconds, seconds)))

    assert rate(0.0) == pytest.approx(tokens[16])
    assert rate(10.0) == 1.0
    fixed = max(gain / (1 + 0.3 * length) for length, gain in enumerate(tokens))
    assert fixed < rate(0.3) < tokens[16]
