"""How requests sample that do not say it: as the checkpoint says, the same from every API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli.main import app
from paceline.errors import ConfigError
from paceline.request.options import SamplingDefaults, of_checkpoint
from paceline.server.config import configure
from paceline.server.local import load_llm
from support.asking import ask
from support.made_gguf import write_gguf
from support.running_server import Running, serve, service_of
from support.tiny_models import write_tiny_model

PROMPT = "Once upon a time"
# As Qwen2.5 says it.
QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5}
SAID = {name: value for name, value in QWEN.items() if name != "do_sample"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("said") / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | QWEN))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), draft="none", dtype="float32", seed=3)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, {}),  # as transformers' generate has it
        ({"do_sample": True}, {"temperature": 1.0}),
        (QWEN, SAID),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),  # as vLLM has it
        ({"top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_what_checkpoints_say(said: dict[str, Any], found: dict[str, Any]) -> None:
    defaults = of_checkpoint(SimpleNamespace(**said), "model")
    assert SamplingParams(**defaults.filled()) == SamplingParams(**found)


def test_who_has_the_last_word() -> None:
    checkpoint = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    user = SamplingDefaults(temperature=0.3, top_k=0)
    filled = SamplingDefaults(top_p=1.0).over(user).over(checkpoint).filled()
    assert SamplingParams(**filled) == SamplingParams(temperature=0.3)
    filled = SamplingDefaults(temperature=0.0).over(checkpoint).filled()
    assert SamplingParams(**filled).greedy
    assert SamplingDefaults(top_p=0.5).filled()["temperature"] == 1.0
    assert SamplingDefaults(top_p=1.0).filled()["temperature"] == 0.0


def test_an_llm_without_parameters(folder: Path, llm: LLM) -> None:
    expected = SamplingParams(**SAID)
    assert llm.default_params == llm.with_draft("ngram").default_params == expected
    assert (
        LLM(str(folder), draft="none", generation_config="none").default_params == SamplingParams()
    )
    changed = LLM(
        str(folder), draft="none", dtype="float32", default_temperature=0.0, default_top_k=0
    )
    assert changed.default_params == replace(expected, temperature=0.0, top_k=0)
    greedy = changed.generate(PROMPT)[0].token_ids
    assert greedy == changed.generate(PROMPT, SamplingParams(repetition_penalty=1.5))[0].token_ids
    assert greedy != changed.generate(PROMPT, SamplingParams())[0].token_ids
    assert len({tuple(llm.generate(PROMPT)[0].token_ids) for _ in range(5)}) == 5


def test_out_of_range(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="default_top_p is 2"):
        LLM(str(folder), draft="none", default_top_p=2.0)
    with pytest.raises(ConfigError, match="generation_config is 'vllm'; use one of auto, none"):
        LLM(str(folder), draft="none", generation_config="vllm")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.0}')
    with pytest.raises(ConfigError, match=r"other: top_p is 0.0;.*generation_config 'none'"):
        LLM(str(other), draft="none")
    assert (
        LLM(str(other), draft="none", generation_config="none").default_params == SamplingParams()
    )


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    yield from serve(service_of(llm.with_draft(max_batch_size=4), "said"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_a_server(server: Running, path: str, body: dict[str, Any]) -> None:
    def text(**fields: Any) -> str:
        answer = ask(server.url, path, {**body, "max_tokens": 24, "seed": 5, **fields}).json
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    neutral = {"temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    assert text() == text(**SAID) != text(**neutral)
    assert text(top_k=0) == text(**(SAID | {"top_k": 0})) != text()
    assert text(temperature=None) == text()
    assert text(top_p=0) == text(temperature=0)


def test_a_response_shows_what_it_was_sampled_with(server: Running) -> None:
    body: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 2}
    shown = ask(server.url, "/v1/responses", body).json
    assert (shown["temperature"], shown["top_p"]) == (0.7, 0.8)
    shown = ask(server.url, "/v1/responses", {**body, "temperature": 0, "top_p": 0}).json
    assert (shown["temperature"], shown["top_p"]) == (0, 0)


def test_the_page_leaves_it_to_the_server(server: Running) -> None:
    page = ask(server.url, "/").text
    (line,) = (line for line in page.splitlines() if 'id="temperature"' in line)
    assert "value=" not in line and "required" not in line


def test_a_server_s_flags_and_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[model]\ndefault_temperature = 0.5\ndefault_top_k = 7\n")
    flags = {"model": str(folder), "default_top_k": 9, "default_min_p": 0.1}
    params = load_llm(configure(flags, path)).default_params
    assert params == replace(SamplingParams(**SAID), temperature=0.5, top_k=9, min_p=0.1)
    neutral = configure({"model": str(folder), "generation_config": "none"})
    assert load_llm(neutral).default_params == SamplingParams()
    with pytest.raises(ConfigError, match="--default-temperature is 200"):
        configure({"default_temperature": 200.0})


def test_the_command_line(folder: Path) -> None:
    def text(*more: str) -> str:
        words = ["--model", str(folder), "--dtype", "float32", "--seed", "5", "--json", *more]
        result = CliRunner().invoke(app, ["generate", PROMPT, "--max-tokens", "24", *words])
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["text"])

    said = [f"--{name.replace('_', '-')}={value}" for name, value in SAID.items()]
    assert text() == text(*said)
    greedy = text("--temperature=0", "--repetition-penalty=1")
    assert greedy == text("--temperature=0", "--repetition-penalty=1", "--top-k=0") != text()
    wrong = CliRunner().invoke(app, ["generate", PROMPT, "--model", "nowhere", "--top-p", "7"])
    assert wrong.exit_code == 1 and "top_p is 7" in wrong.output


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")

    def described(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.95)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)

    path = tmp_path / "tiny.gguf"
    write_gguf(path, change=described)
    params = LLM(str(path), draft="none").default_params
    assert params == SamplingParams(temperature=0.7, top_p=0.95, top_k=20, repetition_penalty=1.05)
    write_gguf(path)
    assert LLM(str(path), draft="none").default_params == SamplingParams()
