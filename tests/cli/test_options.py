"""Options: parsing, defaults, and how they reach the engine."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from paceline import ConfigError, Grammar, SamplingParams
from paceline.cli.options import ModelOptions, expand
from paceline.core.libraries import set_threads
from paceline.core.memory import parse_bytes
from paceline.request.options import SamplingOptions, parse_grammar, parse_logit_bias
from paceline.settings import entry_of, setting
from support.command_lines import paceline


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1K", 1024), ("2M", 2 << 20), ("1.5GiB", 3 << 29), ("2 gb", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1M", "0", "1X", "nan", "inf"])
def test_bad_sizes_are_usage_errors(text: str) -> None:
    refused = paceline("generate", "x", "--kv-cache-memory", text)
    assert refused.exit_code == 2 and "is not a size" in refused.stderr


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("length", "auto", "auto"),
        ("length", "0", 0),
        ("numbers", "2, 6,11", (2, 6, 11)),
        ("numbers", "", ()),
    ],
)
def test_what_a_text_means(kind: str, text: str, value: object) -> None:
    hint = tuple[int, ...] if kind == "numbers" else Any
    assert entry_of("it", hint, setting(None, "", kind=kind)).read(text, "--it") == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [("length", "-1"), ("length", "many"), ("length", "1.5"), ("length", ""), ("numbers", "two")],
)
def test_texts_without_a_meaning(kind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--it is '{text}'; it must be"):
        entry_of("it", tuple[int, ...], setting(None, "", kind=kind)).read(text, "--it")


def test_a_time_is_a_finite_number() -> None:
    refused = paceline("bench", "--seconds", "inf", COLUMNS="200")
    assert refused.exit_code == 2 and "--seconds is inf; it must be" in refused.stderr
    assert paceline("bench", "--seconds", "nan").exit_code == 2


def test_logit_bias_pairs() -> None:
    assert parse_logit_bias(["3=-1.5", "7=2"]) == {3: -1.5, 7: 2.0}
    for bad in ("3", "x=1", "3=y", "="):
        with pytest.raises(ConfigError):
            parse_logit_bias([bad])


def test_defaults_are_those_of_the_api() -> None:
    assert SamplingOptions().params() == SamplingParams()


def test_every_sampling_parameter_has_an_option() -> None:
    options = {item.name for item in fields(SamplingOptions)}
    # A call has one --draft for all its prompts, and one --draft-length; the others are what
    # clients of a server ask for.
    asked = {
        "include_stop_str_in_output",
        "skip_end_tokens",
        "prompt_logprobs",
        "prediction",
        "priority",
    }
    others = {"drafter", "draft_length", "logits_processors", "lora"} | asked
    assert options == {item.name for item in fields(SamplingParams)} - others


def test_grammars(tmp_path: Path) -> None:
    assert parse_grammar("json") == Grammar.json()
    assert parse_grammar("regex:[a:]+") == Grammar("regex", "[a:]+")
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    assert parse_grammar(f"json:@{tmp_path}/schema.json") == Grammar.json({"type": "integer"})
    for text, message in (("digits", "write json"), ("yaml:x", "kind"), ("json:@none", "cannot")):
        with pytest.raises(ConfigError, match=message):
            parse_grammar(text)


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        (ModelOptions(), "auto"),
        (ModelOptions(draft="none"), None),
        (ModelOptions(draft="ngram"), "ngram"),
        (ModelOptions(model="other"), "auto"),
        (ModelOptions(model="other", draft="small"), "small"),
    ],
)
def test_the_draft_that_goes_with_a_model(options: ModelOptions, draft: str | None) -> None:
    assert options.resolved_draft == draft


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def engine(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return SimpleNamespace(setup_notes=())

    monkeypatch.setattr(paceline, "LLM", engine)
    ModelOptions(
        model="m",
        draft_length=3,
        rule="block",
        dtype="float32",
        device="cpu",
        kv_cache_memory=1 << 20,
        max_batch_size=2,
    ).open("d")
    assert calls == [
        (
            ("m", "d"),
            {
                "dtype": "float32",
                "device": "cpu",
                "max_batch_size": 2,
                "kv_cache_memory": 1 << 20,
                "draft_length": 3,
                "drafting": "fair",
                "log_decisions": False,
                "strict": False,
                "rule": "block",
                "prefix_sharing": True,
                "config": None,
                "backend": "auto",
                "tensor_parallel": 1,
                "kv_cache_dtype": "auto",
                "generation_config": "auto",
            },
        )
    ]


def test_expand_puts_groups_back_together() -> None:
    seen: list[tuple[str, SamplingOptions, bool]] = []

    @expand
    def command(
        sampling: SamplingOptions,
        word: str = setting(MISSING, "What to say.", flags=("WORD",)),
        loud: bool = setting(False, "Loudly."),
    ) -> None:
        seen.append((word, sampling, loud))

    app = typer.Typer()
    app.command()(command)
    arguments = ["hello", "--loud", "--top-k", "5", "--stop", "a", "--stop", "b"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert seen == [("hello", SamplingOptions(top_k=5, stop=("a", "b")), True)]


def test_more_threads_than_processors_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """999 of them stall two processors for minutes."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr("paceline.core.libraries.processors", lambda: 2)
    for threads in (None, 1, 2):
        set_threads(threads)
    set_threads(999)
    assert asked == [1, 2, 2]
