"""``paceline serve``: a real process, its flags and file, and the shipped examples."""

from __future__ import annotations

import json
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import LLM
from paceline.cli import serve
from paceline.cli.main import app
from paceline.errors import ModelLoadError
from paceline.server.config import ServeConfig, configure, keys
from paceline.server.local import load_llm
from paceline.settings import tuned
from paceline.settings.tuned import ModelIdentity, TunedSettings
from support.command_lines import assert_one_line, paceline
from support.served_process import ServedProcess

PROMPT = "Once upon a time"
MODEL = "paceline/tiny"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests holds."""
    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)


def completion(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields}


def test_a_server_answers_and_drains(tmp_path: Path) -> None:
    """Answers; on SIGTERM it is unready first, finishes what runs, and exits with 0."""
    config = tmp_path / "server.toml"
    config.write_text(
        '[model]\ndraft = "ngram"\ndraft_length = 3\n[engine]\nthreads = 1\nmax_batch_size = 2\n'
        '[server]\nport = 1\nlog_level = "error"\n'
    )
    arguments = ["--config", str(config), "--log-level", "info"]  # flags win, as --port does
    with ServedProcess(arguments) as server:
        assert server.announcement.startswith(f"serving {MODEL} at http://127.0.0.1:")
        assert "ngram" in server.announcement and " on cpu" in server.announcement
        rebound = server.ask("GET", "/v1/models", headers={"Host": "evil.example"})
        assert rebound.status == 400
        short = server.ask("POST", "/v1/completions", completion(max_tokens=5))
        assert short.status == 200
        assert short.headers["Server"] is None
        assert json.loads(short.read())["usage"]["completion_tokens"] == 5
        body = completion(max_tokens=600, ignore_eos=True, stream=True)
        stream = server.ask("POST", "/v1/completions", body)
        assert stream.readline().startswith(b"data: {")

        server.process.send_signal(signal.SIGTERM)
        server.wait_for_status("/health/ready", 503)
        assert server.ask("GET", "/health").status == 200  # alive all the same
        refused = server.ask("POST", "/v1/completions", completion())
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "shutting_down"
        assert refused.headers["Retry-After"] == "5" and refused.headers["Connection"] == "close"

        lines = [line for line in stream.read().decode().splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        log = "".join(server.errors)
        assert "POST /v1/completions 200" in log and " 5 tokens\n" in log
        assert "600 tokens\n" in log and "SIGTERM: refusing new requests" in log
        assert PROMPT not in log and "Traceback" not in log


@pytest.mark.slow  # a server more
def test_keys_from_the_environment_and_a_second_signal() -> None:
    env = {"PACELINE_API_KEYS": "sk-a,sk-b"}
    arguments = ["--draft", "none", "--threads", "1", "--cors-origin", "https://chat.example"]
    arguments += ["--single-process"]
    with ServedProcess(arguments, env) as server:
        assert "drafters: none" in server.announcement and "2 API keys" in server.announcement
        assert server.ask("GET", "/v1/models").status == 401
        key = {"Authorization": "Bearer sk-b", "Origin": "https://chat.example"}
        models = server.ask("GET", "/v1/models", headers={**key, "Host": "llm.example"})
        assert models.status == 200
        assert models.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        body = completion(max_tokens=1000, ignore_eos=True, stream=True)
        stream = server.ask("POST", "/v1/completions", body, key)
        assert stream.readline().startswith(b"data: {")
        server.process.send_signal(signal.SIGINT)
        server.wait_for_status("/health/ready", 503)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
        assert "sk-" not in "".join(server.errors)


# -- what is refused before anything is loaded -----------------------------------------------------


run = partial(paceline, "serve")


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets as far as loading a model hears of it."""

    def load(settings: object) -> None:
        raise ModelLoadError("a model was loaded")

    monkeypatch.setattr(serve, "_open", load)


@pytest.mark.usefixtures("no_models")
def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert_one_line(run("--port", port), f"port {port}: Address already in use", "--port")


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-queue", "-1"], ["--max-queue is -1", "at least 0"]),
        (["--log-level", "loud"], ["--log-level is 'loud'", "debug, info"]),
        (["--kv-cache-memory", "many"], ["--kv-cache-memory: 'many' is not a size"]),
        (["--draft-length", "x"], ["--draft-length is 'x'", "auto or a whole number"]),
        (["--draft", "none", "--draft", "ngram"], ["'none' cannot be combined"]),
        (["--host", "no such host", "--port", "0"], ["cannot listen on no such host, port 0"]),
        (["--config", "nowhere.toml"], ["config file nowhere.toml cannot be read"]),
        (["--api-key-file", "nowhere"], ["API key file nowhere cannot be read"]),
    ],
)
def test_bad_settings(arguments: list[str], words: list[str]) -> None:
    assert_one_line(run(*arguments), *words)


@pytest.mark.usefixtures("no_models")
def test_bad_config_keys(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[limits]\nmax_queu = 1\n")
    result = run("--config", str(path))
    assert_one_line(result, str(path), "[limits] max_queu: unknown key; the keys are max_queue")


@pytest.mark.parametrize(
    "ways", [["--single-process"], pytest.param([], marks=pytest.mark.slow)], ids=["one", "two"]
)
def test_a_missing_model(tmp_path: Path, ways: list[str]) -> None:
    """Two processes start torch once more, only to say it."""
    missing = str(tmp_path / "nowhere")
    assert_one_line(run(missing, "--port", "0", *ways), "nowhere", "does not exist")


@pytest.mark.usefixtures("no_models")
def test_warnings(tmp_path: Path) -> None:
    """Said before the model is loaded."""
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    with_keys = ("--port", "0", "--api-key-file", str(path))
    exposed = run("--port", "0", "--host", "0.0.0.0").stderr.splitlines()
    quiet = run(*with_keys).stderr.splitlines()
    assert quiet == ["error: a model was loaded"]
    assert exposed[0].startswith("warning: other machines can reach 0.0.0.0")
    assert len(exposed) == 2


def test_tuned_settings(tmp_path: Path) -> None:
    """It gives the drafter, its length and the batch size; what is said by hand wins."""
    target = LLM(MODEL, draft="none", dtype="float32").target
    path = tmp_path / "tuned.toml"
    TunedSettings(
        version=tuned.VERSION,
        model=ModelIdentity.of(target),
        draft=tuned.DraftChoice("ngram:max=3", 3),
        engine=tuned.EngineChoice(5),
    ).write(path)
    said = {"config": str(path), "dtype": "float32"}
    llm = load_llm(configure(said))
    assert llm.drafters == ("ngram",)
    assert llm.engine.scheduler.config.max_batch_size == 5
    plain = load_llm(configure({**said, "draft": ["none"], "max_batch_size": 2}))
    assert plain.drafters == ("none",)
    assert plain.engine.scheduler.config.max_batch_size == 2
    assert_one_line(
        run("--config", str(tmp_path / "no"), "--port", "0"), "config file", "cannot be"
    )


# -- flags and file --------------------------------------------------------------------------------


def flags() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {item.name: item for item in group.commands["serve"].params}


def test_flags_and_keys_are_in_step() -> None:
    """Every key has a flag that gives the same value, and every flag a key."""
    names = {entry.name for entry in keys()}
    assert set(flags()) - {"print_config", "help", "help_all"} == names
    for name in names - {"model"}:
        assert f"--{name.replace('_', '-')}" in flags()[name].opts


def test_print_config_is_a_config(tmp_path: Path) -> None:
    """Everything said with flags comes back from the printed file; keys do not."""
    keys_file = tmp_path / "keys"
    keys_file.write_text("sk-secret\n")
    tuned_file = tmp_path / "p.toml"
    tuned_file.write_text("version = 1\n")
    arguments = ["folder", "--draft", "ngram", "--draft", "suffix", "--draft-length", "3"]
    arguments += ["--rule", "block", "--config", str(tuned_file), "--served-model-name", "mine"]
    arguments += ["--dtype", "float32", "--device", "cpu", "--threads", "1"]
    arguments += ["--max-batch-size", "2", "--kv-cache-memory", "64M", "--host", "::1"]
    arguments += [
        "--single-process",
        "--port",
        "1",
        "--log-level",
        "debug",
        "--log-prompts",
        "--drain-seconds",
        "1.5",
    ]
    arguments += ["--backend", "native", "--quantize", "int8", "--draft-quantize", "int4"]
    arguments += ["--tensor-parallel", "2", "--offload", "disk", "--weights-memory", "1G"]
    arguments += ["--draft-offload", "disk", "--draft-device", "cuda", "--kv-cache-dtype", "int8"]
    arguments += ["--max-model-len", "512", "--lora", "sql=folder", "--lora-updates"]
    arguments += ["--max-queue", "1", "--deadline", "5", "--max-request-bytes", "1K"]
    arguments += ["--generation-config", "none", "--default-temperature", "0.7"]
    arguments += ["--default-top-p", "0.9", "--default-top-k", "20", "--default-min-p", "0.1"]
    arguments += ["--default-repetition-penalty", "1.1"]
    arguments += ["--drafting", "throughput", "--log-decisions"]
    arguments += ["--api-key-file", str(keys_file), "--cors-origin", "https://chat.example"]
    used = {a[2:].replace("-", "_") for a in arguments if a.startswith("--")} | {"model"}
    assert used == {entry.name for entry in keys()}
    printed = run(*arguments, "--print-config")
    assert printed.exit_code == 0, printed.output
    assert "sk-secret" not in printed.output
    assert "# 1 API keys (not shown)" in printed.stdout
    path = tmp_path / "printed.toml"
    path.write_text(printed.stdout)
    config = configure({}, path)
    default = ServeConfig()
    assert not [e.name for e in keys() if getattr(config, e.name) == getattr(default, e.name)]
    assert config.kv_cache_memory == 2**26 and config.draft == ("ngram", "suffix")
    # A flag can also take back what a file says.
    again = run("--config", str(path), "--no-log-prompts", "--print-config")
    assert "log_prompts = false" in again.stdout
