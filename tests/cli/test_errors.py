"""Bad input: one clear line on stderr, the right exit code, never a traceback."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM, ModelLoadError, PacelineError, __version__
from paceline.__main__ import main
from paceline.kernels.compile import origin
from support.command_lines import assert_one_line, paceline, refusals
from support.tiny_models import TinyPair

COMMAND = [sys.executable, "-m", "paceline"]

PLAIN = ("--draft", "none")


def test_missing_model_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert_one_line(paceline("generate", "hi", "--model", missing), "nowhere", "does not exist")


def test_prompts_and_draft_are_looked_at_before_anything_is_loaded() -> None:
    missing = ("--model", "/nowhere/at/all")
    assert_one_line(paceline("generate", "", *missing), "prompt is empty")
    assert_one_line(
        paceline("generate", "hi", "--draft", "ngramm", *missing), "did you mean ngram?"
    )
    assert_one_line(paceline("generate", "hi", "--draft", "ngram:x=3", *missing), "no option x")
    assert_one_line(paceline("generate", "caf\udce9", *missing), "prompt is not UTF-8")


def test_names_of_built_in_models_are_listed() -> None:
    result = paceline("generate", "hi", "--model", "paceline/smolm2")
    assert_one_line(result, "there is no built-in model 'paceline/smolm2'; the built-in ones are")
    assert "paceline/smollm2" in result.stderr


def test_a_head_that_is_named_as_a_draft_model() -> None:
    with pytest.raises(ModelLoadError, match="use --draft eagle3:paceline/tiny-eagle3"):
        LLM("paceline/tiny", draft="paceline/tiny-eagle3")


def test_folder_without_weights(tiny_pair: TinyPair, tmp_path: Path) -> None:
    shutil.copytree(
        tiny_pair.target, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors")
    )
    assert_one_line(paceline("generate", "hi", "--model", str(tmp_path / "m")), "no weights")


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "index.json", "the name"])
def test_a_download_in_parts_that_is_not_whole(
    tiny_pair: TinyPair, tmp_path: Path, lost: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target)
    half = sum(weight.nbytes for weight in model.parameters()) // 2
    model.save_pretrained(tmp_path, max_shard_size=half + half // 2)
    AutoTokenizer.from_pretrained(tiny_pair.target).save_pretrained(tmp_path)
    if lost == "the name":  # of a shard: no file's can be as long
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00002", "9" * 5000))
    else:
        (file,) = tmp_path.glob(f"*{lost}")
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"cannot be read: .*; finish the download") as told:
        LLM(str(tmp_path), draft=None)
    assert str(tmp_path) in str(told.value) and "\n" not in str(told.value)


def test_folder_without_config(tmp_path: Path) -> None:
    assert_one_line(paceline("generate", "hi", "--model", str(tmp_path)), "config.json")


def test_unsupported_architecture(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    assert_one_line(paceline("generate", "hi", "--model", str(tmp_path)), "bloom")


def test_unknown_draft(tiny_pair: TinyPair) -> None:
    result = paceline("generate", "hi", "--model", tiny_pair.target, "--draft", "ngram:biggest=4")
    assert_one_line(result, "biggest")


def test_prompt_too_long(tiny_pair: TinyPair) -> None:
    result = paceline("generate", "long " * 300, "--model", tiny_pair.target, *PLAIN)
    assert_one_line(result, "tokens", "shorten the prompt")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_cache_too_small(tiny_pair: TinyPair, command: str) -> None:
    result = paceline(command, "hi", "--model", tiny_pair.target, "--kv-cache-memory", "1K")
    assert_one_line(result, "cache", "kv_cache_memory")


def test_empty_prompt(tiny_pair: TinyPair) -> None:
    assert_one_line(
        paceline("generate", "", "--model", tiny_pair.target, *PLAIN), "prompt is empty"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], ["temperature is -1.0"]),
        (["--top-p", "1.5"], ["top_p is 1.5"]),
        (["--top-p", "0"], ["top_p is 0.0"]),
        (["--top-k", "-7"], ["top_k is -7"]),
        (["--max-tokens", "0"], ["max_tokens is 0"]),
        (["--min-tokens", "200"], ["min_tokens is 200", "128"]),
        (["--stop", ""], ["stop string is empty"]),
        (["--seed", "-1"], ["seed is -1"]),
    ],
)
def test_sampling_parameters_out_of_range(flags: list[str], words: list[str]) -> None:
    # Refused before any model is read: the folder does not exist.
    assert_one_line(paceline("generate", "hi", "--model", "./nowhere", *flags), *words)


@pytest.mark.parametrize(
    ("flags", "word"),
    refusals("""
    --rule lucky | lucky
    --dtype int3 | int3
    --device abacus | abacus
    --logit-bias 99999=1 | 99999
    --logit-bias x | write ID=VALUE
    """),
)
def test_engine_options_out_of_range(tiny_pair: TinyPair, flags: list[str], word: str) -> None:
    assert_one_line(paceline("generate", "hi", "--model", tiny_pair.target, *PLAIN, *flags), word)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "hi", "--temprature", "1"],
        ["generate", "hi", "--max-tokens", "many"],
        ["generate", "hi", "--kv-cache-memory", "lots"],
        ["generate", "hi", "--draft-length", "some"],
        ["generate", "hi", "--draft-length", "65"],
        ["demo", "--draft", "none"],
        ["train", "draft"],
        ["sing"],
    ],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str]) -> None:
    result = paceline(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "Usage" in result.stderr


def test_training_data_is_missing(tmp_path: Path) -> None:
    result = paceline(
        "train", "draft", "--data", str(tmp_path / "no.jsonl"), "--out", str(tmp_path / "o")
    )
    assert_one_line(result, "no.jsonl", "does not exist")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PacelineError("first line\n  second line"), ["error: first line second line\n"]),
        (
            OSError(28, "No space left"),
            ["output cannot be written: No space left; free some space"],
        ),
        (ZeroDivisionError("by zero"), ["unexpected ZeroDivisionError: by zero", "--debug"]),
    ],
)
def test_every_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: list[str]
) -> None:
    def fail(self: object) -> None:
        raise error

    monkeypatch.setattr("paceline.cli.generate.SamplingOptions.params", fail)
    result = paceline("generate", "hi")
    assert result.exit_code == 1
    assert all(word in result.stderr for word in words)
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback() -> None:
    environment = {**os.environ, "PACELINE_DEBUG": "1"}
    arguments = ["generate", "hi", "--temperature", "-1"]
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_closed_and_full_streams() -> None:
    """As a shell leaves them: ``2>&-``, ``<&-``, ``>/dev/full``."""
    command = shlex.join(COMMAND)
    for tail, code, words in (
        ("--version >/dev/full", 1, "error: the output cannot be written"),
        ("--help >/dev/full", 1, "error: the output cannot be written"),
        ("generate - <&-", 1, "error: a prompt is empty"),
        ("generate - </dev/null 2>&-", 1, ""),
        ("quantize --help 2>&-", 0, ""),
    ):
        line, environment = f"{command} {tail}", {**os.environ, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == code and done.stderr.startswith(words), (tail, done.stderr)
        assert done.stderr.count("\n") == bool(words)


def test_version() -> None:
    result = paceline("--version")
    assert result.exit_code == 0
    version, build, backend, kernels = result.stdout.splitlines()
    assert version == f"paceline {__version__}"
    assert build.startswith(("build: checkout", "build: wheel py3-none-"))
    assert backend.startswith("backend on CPUs: ")
    assert kernels == f"native kernels: {origin()}"


def test_version_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "off")
    lines = paceline("--version").stdout.splitlines()
    assert lines[2] == "backend on CPUs: reference (torch)"
    assert lines[3] == "native kernels: none (PACELINE_NATIVE=off asks for no kernels)"


def test_interrupt_inside_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.generate.SamplingOptions.params", interrupt)
    result = paceline("generate", "hi")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_interrupt_while_the_program_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.main.app", interrupt)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow  # a process is interrupted
def test_ctrl_c_during_generation(tiny_pair: TinyPair) -> None:
    """SIGINT when the first of many completions has been printed."""
    arguments = ["generate", "hello", "--model", tiny_pair.target, "--ignore-eos", "--n", "400"]
    arguments += PLAIN
    with subprocess.Popen(
        [
            *COMMAND,
            *arguments,
            "--max-tokens",
            "100",
            "--max-batch-size",
            "2",
            "--temperature",
            "1",
            "--seed",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline().startswith("hello")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
        code = process.wait(timeout=60)
    assert code == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert all(line.startswith(("starting", "loading")) for line in errors.splitlines()[:-1])
