"""generate and chat, on a pair of random models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from typer.testing import Result

from paceline.request.completion import CompletionStats
from support.command_lines import paceline
from support.tiny_models import TinyPair

FIELDS = {"prompt", "text", "token_ids", "logprobs", "finish_reason", "index", "stats"}


def records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def base(tiny_pair: TinyPair) -> list[str]:
    return ["--model", tiny_pair.target, "--dtype", "float32", "--max-tokens", "16"]


def test_json_has_the_names_of_the_api(base: Sequence[str], tiny_pair: TinyPair) -> None:
    flags = ["--draft", tiny_pair.draft, "--draft-length", "3", "--json", "--logprobs", "2"]
    (record,) = records(paceline("generate", "Once upon", *base, *flags))
    assert record.keys() == FIELDS
    assert {*record["stats"], "arrivals"} == {item.name for item in fields(CompletionStats)}
    assert record["prompt"] == "Once upon"
    assert record["index"] == 0
    assert record["finish_reason"] == "length"
    assert len(record["token_ids"]) == len(record["logprobs"]) == 16
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert record["stats"]["drafted_tokens"] > 0


def test_plain_and_speculative_texts_are_the_same(base: Sequence[str], tiny_pair: TinyPair) -> None:
    sampled = ["--temperature", "1", "--seed", "7", "--json"]
    texts = []
    for draft in ("none", "ngram", tiny_pair.draft, f"tree:{tiny_pair.draft},branching=2x1"):
        (record,) = records(paceline("generate", "Lily", *base, *sampled, "--draft", draft))
        texts.append(record["token_ids"])
    assert texts.count(texts[0]) == len(texts)
    (plain,) = records(paceline("generate", "Lily", *base, *sampled, "--draft", "none"))
    assert plain["stats"]["drafted_tokens"] == 0


def test_another_vocabulary_is_reported(base: Sequence[str], tiny_pair: TinyPair) -> None:
    with_draft = paceline("generate", "Lily", *base, "--draft", tiny_pair.draft)
    other = paceline("generate", "Lily", *base, "--draft", tiny_pair.foreign)
    assert other.exit_code == 0, other.output
    assert other.stdout == with_draft.stdout
    assert "draft vocabulary: token-level intersection, " in other.stderr
    assert "draft vocabulary" not in with_draft.stderr


def test_several_prompts_and_samples_come_in_order(base: Sequence[str]) -> None:
    flags = ["--n", "2", "--json", "--temperature", "1", "--seed", "1"]
    completions = records(paceline("generate", "Once", "The", *base, *flags))
    assert [(r["prompt"], r["index"]) for r in completions] == [
        ("Once", 0),
        ("Once", 1),
        ("The", 0),
        ("The", 1),
    ]
    shown = paceline("generate", "Once", "The", *base, *flags[:2], *flags[3:])
    assert shown.exit_code == 0
    assert all(record["text"].strip() in shown.stdout for record in completions)


def test_streamed_text_is_the_text(base: Sequence[str], tiny_pair: TinyPair) -> None:
    draft = ["--draft", tiny_pair.draft]
    (record,) = records(paceline("generate", "Once upon", *base, *draft, "--json"))
    shown = paceline("generate", "Once upon", *base, *draft)
    assert shown.exit_code == 0
    assert shown.stdout.rstrip("\n") == record["text"].rstrip("\n")
    assert "16 tokens (length)" in shown.stderr
    one = paceline("generate", "Once upon", *base, "--max-tokens", "1", "--logprobs", "1").stderr
    assert "1 token (length)" in one and "--logprobs are shown with --json only" in one


def test_draft_tokens_are_coloured_on_request(base: Sequence[str], tiny_pair: TinyPair) -> None:
    # Drafted by itself, a greedy target accepts everything.
    arguments = ["generate", "Once upon", *base, "--draft", tiny_pair.target]
    arguments += ["--draft-length", "3"]
    green = "\x1b[32m"
    assert green in paceline(*arguments, "--show-draft").stdout
    assert "\x1b[" not in paceline(*arguments, "--hide-draft").stdout


def test_prompt_from_stdin(base: Sequence[str]) -> None:
    (record,) = records(paceline("generate", "-", *base, "--json", input="Once upon\n"))
    assert record["prompt"] == "Once upon\n"


def test_chat_template(base: Sequence[str]) -> None:
    (generated,) = records(paceline("generate", "hello", "--chat", *base, "--json"))
    (answered,) = records(paceline("chat", "hello", *base, "--json"))
    assert generated["prompt"] == "<|endoftext|><|user|>hello<|end|><|assistant|>"
    assert answered["token_ids"] == generated["token_ids"]
    assert paceline("chat", "hello", *base).exit_code == 0


def test_conversation_keeps_its_turns_until_reset(base: Sequence[str]) -> None:
    talk = "hello\n\nmore\n/reset\nnew\n/quit\nunread\n"
    flags = ["--system", "Be brief.", "--json", "--logit-bias", "4=-100"]
    first, second, third = records(paceline("chat", *base, *flags, input=talk))
    opening = "<|endoftext|><|system|>Be brief.<|end|>"
    assert first["prompt"] == f"{opening}<|user|>hello<|end|><|assistant|>"
    assert second["prompt"].startswith(first["prompt"])
    assert second["prompt"].endswith("<|end|><|user|>more<|end|><|assistant|>")
    assert third["prompt"] == f"{opening}<|user|>new<|end|><|assistant|>"


def test_sampling_options_act(base: Sequence[str]) -> None:
    (free,) = records(paceline("generate", "Once", *base, "--json"))
    banned = f"{free['token_ids'][0]}=-100"
    (other,) = records(paceline("generate", "Once", *base, "--json", "--logit-bias", banned))
    assert other["token_ids"][0] != free["token_ids"][0]
    stop = ["--stop-token-id", str(other["token_ids"][0]), "--logit-bias", banned]
    (stopped,) = records(paceline("generate", "Once", *base, "--json", *stop))
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["token_ids"]) == 1


def test_a_request_that_fails_is_told_and_exits_1(
    base: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engine.engine import Engine

    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Engine, "_build_commit", fails)
    result = paceline("generate", "Once upon", *base, "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert (record["finish_reason"], record["error"]) == ("error", "RuntimeError: planted")
    shown = paceline("generate", "Once upon", *base)
    assert shown.exit_code == 1 and "0 tokens (RuntimeError: planted)" in shown.stderr


def test_an_answer_that_the_cache_cuts_says_so(base: Sequence[str]) -> None:
    flags = ["--ignore-eos", "--max-tokens", "90", "--draft", "none"]
    for small, words in (
        (["--kv-cache-memory", "40K"], "raise kv_cache_memory"),
        (["--max-model-len", "64"], "raise max_model_len"),
    ):
        for how in ([], ["--json"]):
            done = paceline("generate", "Once upon", "A", *base, *flags, *small, *how)
            assert done.exit_code == 0 and done.stderr.count("cut short: with the answer") == 1
            assert words in done.stderr and "cut short" not in done.stdout
    full = paceline("generate", "Once upon", *base, *flags, "--max-tokens", "60")
    assert "cut short" not in full.stderr


def test_plain_decoding_says_nothing_of_drafts(base: Sequence[str]) -> None:
    """It said "no draft was tried: it would not have paid"."""
    done = paceline("generate", "Once upon", *base, "--draft", "none")
    assert "tokens/s" in done.output and "draft" not in done.output
