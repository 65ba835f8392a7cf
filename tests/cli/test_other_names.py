"""Other names of an option lead to ours: told once, and one of both is enough."""

from __future__ import annotations

import pytest

from paceline.cli.options import Command
from paceline.core.keywords import TABLES, our_name
from support.command_lines import every_command, paceline

COMMANDS = dict(every_command())


def test_other_names_lead_to_ours() -> None:
    asked = ["generate", "hello", "--model", "paceline/tiny", "--max-new-tokens", "2"]
    done = paceline(*asked, "--drafter=none", "--json")
    assert done.exit_code == 0, done.output
    assert "--drafter is --draft here" in done.stderr
    assert "--max-new-tokens is --max-tokens here" in done.stderr
    printed = paceline("serve", "--model", "paceline/tiny", "--max-num-seqs", "3", "--print-config")
    assert 'model = "paceline/tiny"' in printed.stdout and "max_batch_size = 3" in printed.stdout
    refused = paceline("serve", "--gpu-memory-utilization", "0.9")
    assert refused.exit_code == 2 and "kv_cache_memory" in refused.output


# Each by its command: what we, or the field, called an option, and what it is called now.
RENAMED = """
serve --max-num-seqs --max-batch-size
serve --max-running-requests --max-batch-size
serve --concurrency --max-batch-size
generate --batch --max-batch-size
bench --max-concurrency --concurrency
bench --max-batch-size --concurrency
bench --lengths --draft-length
tune --max-batch-size --concurrency
profile --max-batch-size --concurrency
tune --batch-size --concurrency
generate --context-length --max-model-len
certify --drafter --draft
tune --method --draft
train eagle3 --target --model
train draft --teacher --model
train sample --target --model
train draft --draft --init
train draft --max-length --seq-len
train sample --batch --max-batch-size
train sample --count --num-prompts
train sample --longest --max-text-len
train sample --max-prompt --max-prompt-len
train medusa --heads --medusa-heads
train medusa --head-decay --step-decay
train eagle3 --ttt-stride --stride
train medusa --medusa-num-layers --medusa-layers
certify --texts --num-prompts
generate --seq-len --max-model-len
quantize --group --group-size
quantize --head --lm-head
"""


@pytest.mark.parametrize("line", RENAMED.strip().splitlines())
def test_a_name_of_before_is_told_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "format_help", lambda *_: None)  # which takes long
    *words, other, ours = line.split()
    done = paceline(*words, other, "1", f"{other}=2", "--help")
    assert done.exit_code == 0, done.output
    assert done.stderr == f"note: {other} is {ours} here\n"
    for given in ([other, "1", f"{ours}=2"], [ours, "1", other, "2"]):
        refused = paceline(*words, *given, COLUMNS="200")
        assert refused.exit_code == 2
        assert f"{other} is {ours} here; give it once" in refused.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_other_name_is_told(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "format_help", lambda *_: None)  # which takes long
    flags = {flag for item in COMMANDS[words].params for flag in (*item.opts, *item.secondary_opts)}
    known = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    for name in {name for table in TABLES.values() for name in table} - known:
        ours, other = our_name(name, known), f"--{name.replace('_', '-')}"
        done = paceline(*words, other, "1", "--help", COLUMNS="300")
        if " " in ours:
            assert done.exit_code == 2 and ours in done.stderr, done.stderr
        elif ours:
            assert done.stderr == f"note: {other} is --{ours.replace('_', '-')} here\n"
        else:
            assert f"note: {other}" not in done.stderr


@pytest.mark.parametrize("given", [["x", "--model", "y"], ["x", "--model=y"]])
def test_a_model_by_position_and_by_name(given: list[str]) -> None:
    refused = paceline("doctor", *given, COLUMNS="200")
    assert refused.exit_code == 2 and "MODEL is --model here; give it once" in refused.stderr
    assert paceline("recommend", *given, COLUMNS="200").exit_code == 2


def test_a_model_by_name_where_it_has_a_position() -> None:
    for given in (["--model", "paceline/tiny"], ["--model=paceline/tiny"]):
        printed = paceline("serve", *given, "--print-config")
        assert 'model = "paceline/tiny"' in printed.stdout and not printed.stderr
    printed = paceline("serve", "--model-path=paceline/tiny", "--print-config")
    assert 'model = "paceline/tiny"' in printed.stdout
    assert printed.stderr == "note: --model-path is --model here\n"


def test_names_with_underscores_as_in_python() -> None:
    done = paceline("generate", "--max_tokens", "4", "--help")
    assert done.exit_code == 0 and done.stderr == "note: --max_tokens is --max-tokens here\n"
    printed = paceline("serve", "--max_batch_size=3", "--print-config")
    assert "max_batch_size = 3" in printed.stdout


def test_layers_of_a_head_that_is_trained_are_no_other_option() -> None:
    assert "no such option" in paceline("train", "eagle", "--layers", "2").stderr.lower()


def test_what_stands_behind_two_dashes_is_no_option() -> None:
    done = paceline("generate", "--help", "--", "--drafter")
    assert done.exit_code == 0 and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "eagle3", "--processes", "2"], "there is no --processes; one process trains"),
        (["certify", "--continue"], "there is no --continue; give the run more --seconds"),
        (["tune", "--state", "x"], "there is no --state; give the run more --seconds"),
        (["demo", "--pull"], "there is no --pull; paceline pull smollm2 fetches"),
        (["certify", "--perplexity", "x"], "there is no --perplexity; paceline quantize"),
        (["bench", "--suite", "gsm8k", "x"], "there is no --suite; measure the file: --prompts"),
    ],
)
def test_options_that_are_gone_say_what_to_do(arguments: list[str], words: str) -> None:
    refused = paceline(*arguments, COLUMNS="200")
    assert refused.exit_code == 2 and words in refused.output


def test_a_model_by_position_where_it_is_the_only_one() -> None:
    done = paceline("doctor", "paceline/tiny", "--draft", "none", "--json")
    assert '"model": "paceline/tiny"' in done.stdout or "paceline/tiny" in done.stdout
