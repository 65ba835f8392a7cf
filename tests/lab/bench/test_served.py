"""Servers of other engines: what they are asked, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.lab.bench.engines import (
    EQUAL,
    BaselineFailedError,
    EngineFactory,
    apportion,
    parse_method,
)
from paceline.lab.bench.runner import BenchRequest, TimedRun
from paceline.lab.openai_client import OpenAIClient, ServerFailedError, choices_of
from paceline.llm import LLM
from support.planted_server import PlantedServer, served
from support.running_server import serve, service_of
from support.tiny_models import TinyPair

HERE = Path(__file__).parent
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (12, 13))


def requests(tokens: int = 4, **more: Any) -> list[BenchRequest]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **more)
    return [BenchRequest(prompt, params) for prompt in PROMPTS]


def counted(run: TimedRun, tokens: int = 4) -> list[list[int]]:
    """The ids of all answers, after what holds of every run was looked at."""
    assert run.tokens == tokens * len(run.answers)
    for answer in run.answers:
        times = [at for at, _ in answer.arrivals]
        assert times == sorted(times) and times[0] > 0 and times[-1] <= run.seconds
        assert sum(count for _, count in answer.arrivals) == answer.count
    return [list(answer.tokens) for answer in run.answers]


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> Iterator[LLM]:
    yield LLM(tiny_pair.target, draft="none", dtype="float32", max_batch_size=4)


# -- specs -----------------------------------------------------------------------------------------


def test_specs() -> None:
    text = "url:http://127.0.0.1:8080"
    method = parse_method(text, None)
    assert (method.name, method.draft, method.url) == (text, None, "http://127.0.0.1:8080")
    assert not method.learns_across_requests
    with pytest.raises(ConfigError, match="needs its address"):
        parse_method("url:", None)
    with pytest.raises(ConfigError, match=r"is not .* url:http"):  # servers are named by URL
        parse_method("openvino:folder", None)


def test_addresses() -> None:
    for url, base in (
        ("http://a:1", "http://a:1/v1"),
        ("http://a:1/v1/", "http://a:1/v1"),
        ("https://a/b/v3", "https://a/b/v3"),
        ("http://a/b", "http://a/b/v1"),
    ):
        assert OpenAIClient.at(url).url == base


def test_tokens_are_dealt_out_whole() -> None:
    assert apportion(7, [1, 1, 1]) == [2, 2, 3]
    assert apportion(3, [2, 1, 0]) == [2, 1, 0] and sum(apportion(11, [3, 5, 1, 1])) == 11


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": {"text": "a"}},
        {"choices": ["a"]},
        {"choices": [{"token_ids": ["a"]}]},
        {"choices": [{"logprobs": {"content": [{"token": "a"}]}}]},
        {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": ["b"]}}]},
    ],
    ids=str,
)
def test_choices_outside_the_protocol_are_failures_of_the_server(answer: dict[str, Any]) -> None:
    with pytest.raises(ServerFailedError):
        choices_of(answer)


# -- any server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    """Our server with the same weights."""
    beside = llm.with_draft(None, max_batch_size=4)
    for running in serve(service_of(beside, "it")):
        yield running.url


@pytest.mark.parametrize("clients", [1, 3])
def test_a_server_writes_what_the_engine_writes(llm: LLM, url: str, clients: int) -> None:
    factory = EngineFactory(llm)
    engine = factory.create(parse_method(f"url:{url}/v1", None), clients)
    written = counted(engine.run(requests()))
    wanted = llm.generate([list(p) for p in PROMPTS], requests()[0].params)
    texts = [llm.tokenizer.decode(ids) for ids in written]
    assert texts == [llm.tokenizer.decode(c.token_ids) for c in wanted]
    (words,) = factory.unequal.values()
    assert words == {"ids": EQUAL, "ignore_eos": EQUAL}


def test_what_a_server_does_not_know_is_told(llm: LLM) -> None:
    """One that reads texts only, and counts otherwise."""
    factory = EngineFactory(llm)
    with served(PlantedServer()) as address:
        method = parse_method(f"url:{address}", None)
        run = factory.create(method, 1).run(requests())
        words = factory.unequal[method.name]
    assert run.answers and words != dict.fromkeys(words, EQUAL)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("http://127.0.0.1:9", "answers at"),
        ("http://127.0.0.1:9/v3#it", "answers at"),
        ("nowhere", "no URL"),
        ("http://x:y", "no URL"),
    ],
)
def test_nobody_there(llm: LLM, where: str, words: str) -> None:
    with pytest.raises((BaselineFailedError, ConfigError), match=words) as caught:
        EngineFactory(llm).create(parse_method(f"url:{where}", None), 1)
    assert "\n" not in str(caught.value)
