"""Servers are certified by their answers: each planted fault is found and named, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from paceline.errors import ConfigError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import Certificate
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.server import ServerCertifier, connect, name_of
from paceline.lab.openai_client import AnswerToken, OpenAIClient, ScoredText, ServerError
from support.diagonal import diagonal
from support.planted_server import FAULTS, PlantedServer, served

PROMPTS = [("one", "Once upon a time"), ("two", "What is said of"), ("three", "It is")]
EFFORT = Effort(requests=60, max_tokens=24)


def outcome(
    planted: PlantedServer, against: PlantedServer | None = None, effort: Effort = EFFORT
) -> Certificate:
    with served(planted) as url, served(against or PlantedServer()) as other:
        server, off = connect(url)
        assert off is None and server.fields == {"model": "planted"}
        reference = None if against is None else connect(other)[0]
        certifier = ServerCertifier(server, reference, PROMPTS, effort)
        said: list[str] = []
        certifier.run(said.append)
        assert len(said) == certifier.sent == effort.requests
        return certifier.certificate()


def test_addresses() -> None:
    for url, base in (
        ("http://a:1", "http://a:1/v1"),
        ("http://a:1/v1/", "http://a:1/v1"),
        ("https://a/b/v3", "https://a/b/v3"),
        ("http://a/b", "http://a/b/v1"),
    ):
        assert OpenAIClient.at(url).url == base


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": {"text": "a"}},
        {"choices": ["a"]},
        {"choices": [{"logprobs": {"content": [{"token": "a"}]}}]},
        {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": ["b"]}}]},
        {"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": "b"}]}}]},
    ],
    ids=str,
)
def test_an_answer_that_is_not_in_the_protocol_is_an_error(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenAIClient, "_answer", lambda *_: answer)
    with pytest.raises(ServerError, match="http://a/v1: no valid answer: "):
        OpenAIClient.at("http://a").complete(prompt="a")


def test_a_logprob_of_null_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers write minus infinity so, which JSON cannot."""
    top = {"a": -0.1, "b": None}
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [top]}
    answer = {"choices": [{"text": "a", "logprobs": logprobs}]}
    monkeypatch.setattr(OpenAIClient, "_answer", lambda *_: answer)
    (token,) = OpenAIClient.at("http://a").complete(prompt="a").tokens
    assert token == AnswerToken("a", -0.1, {"a": -0.1})


@pytest.mark.parametrize("content", ["[" * 100_000, '{"data": 5}'])
def test_models_that_are_no_list(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.lab.openai_client.urlopen", lambda *_, **__: BytesIO(content.encode())
    )
    with pytest.raises(ConfigError, match=r"no server answers at|lists no model"):
        connect("http://a")


@pytest.mark.parametrize("compared", [True, False])
def test_a_correct_server_is_certified(compared: bool) -> None:
    certificate = outcome(PlantedServer(), PlantedServer(seed=8) if compared else None)
    assert certificate.lossless, certificate.verdict
    assert certificate.verdict.startswith("CERTIFIED: ")
    assert {part.name for part in certificate.rows("parts")} == {*FAULTS.values()}
    assert all(part.checked for part in certificate.rows("parts"))
    (test,) = certificate.rows("tests")
    assert test.outcome.samples > 1000 and 0 < test.smallest_bias < 0.2
    record = json.loads(json.dumps(certificate.record()))
    assert record["lossless"] and record["problems"] == []
    assert record["requests"] == EFFORT.requests
    assert certificate.report().sections[0].title == "Parts"


@pytest.mark.parametrize(
    "planted",
    [PlantedServer(logprobs="records"), PlantedServer(cuts=True)],
    ids=["records", "cuts"],
)
def test_formats_of_other_servers_are_accepted(planted: PlantedServer) -> None:
    """llama.cpp's format of logprobs, and its default top-k."""
    certificate = outcome(planted)
    assert certificate.lossless, (certificate.verdict, certificate.problems)


def test_errors_are_detected_in_llama_cpps_format() -> None:
    for fault in ("zeros", "corrupt"):
        certificate = outcome(PlantedServer(fault, logprobs="records"))
        assert FAULTS[fault] in {problem.part for problem in certificate.problems}


@pytest.mark.parametrize(("fault", "compared"), diagonal(list(FAULTS), [True, False]))
def test_each_planted_error_is_detected(fault: str, compared: bool) -> None:
    certificate = outcome(PlantedServer(fault), PlantedServer(seed=8) if compared else None)
    assert not certificate.lossless
    assert certificate.verdict.startswith("NOT LOSSLESS: ")
    assert FAULTS[fault] in {problem.part for problem in certificate.problems}, certificate.problems


def test_a_near_tie_is_not_an_error() -> None:
    """Two words a tenth of a nat apart, which rounding may swap."""

    def two_words(second: str, logprob: float, likeliest: dict[str, float]) -> ScoredText:
        first = AnswerToken("a", -0.1, {"a": -0.1})
        return ScoredText(f"a{second}", (first, AnswerToken(second, logprob, likeliest)))

    likeliest = {" b": -0.7, " c": -0.8}
    one, other = two_words(" b", -0.7, likeliest), two_words(" c", -0.8, likeliest)
    certifier = ServerCertifier(OpenAIClient("http://here/v1"), None, PROMPTS)
    assert [*certifier._differs(one, one)] == [] and certifier.greedy.ties == 0
    assert [*certifier._differs(one, other)] == [] and certifier.greedy.ties == 1
    far = two_words(" b", -0.1, {" b": -0.1, " c": -4.0})
    (problem,) = certifier._differs(other, far)
    assert problem == "token 1 is ' c', expected ' b', which is 3.90 nats likelier"
    (problem,) = certifier._differs(one, replace(one, text="a", tokens=one.tokens[:1]))
    assert problem == "one text ends after 1 tokens" and certifier.greedy.ties == 1


def test_without_logprobs_nothing_can_be_certified() -> None:
    with pytest.raises(ServerError, match=r"http.* gives no logprobs"):
        outcome(PlantedServer(logprobs=None))


@pytest.mark.parametrize("late", [TimeoutError("timed out"), URLError(TimeoutError("timed out"))])
def test_a_server_that_does_not_answer_is_an_error(
    late: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Request, timeout: float) -> Any:
        if request.data:
            raise late
        return urlopen(request, timeout=timeout)

    monkeypatch.setattr("paceline.lab.openai_client.urlopen", answer)
    with pytest.raises(ServerError, match="timed out"):
        outcome(PlantedServer())


def test_too_little_effort_or_time_certifies_nothing() -> None:
    certificate = outcome(PlantedServer(), effort=Effort(requests=3, max_tokens=8))
    assert certificate.verdict.startswith("NOT ENOUGH: whole texts compared: 1, not 2; only a bias")
    assert not certificate.problems
    with served(PlantedServer()) as url:
        certifier = ServerCertifier(connect(url)[0], None, PROMPTS, EFFORT, Budget(1e-9))
        certifier.run()
    assert certifier.sent == 0 and not certifier.certificate().lossless


def test_addresses_without_a_server() -> None:
    with pytest.raises(ConfigError, match="no server answers at"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="is no URL"):
        connect("localhost:8000")
    with pytest.raises(ConfigError, match="requests is 0"):
        Effort(requests=0)


def test_our_own_server_with_and_without_speculation() -> None:
    from paceline import LLM
    from support.running_server import serve, service_of

    llm = LLM("paceline/tiny", "ngram", dtype="float32")
    for running in serve(service_of(llm, "tiny")):
        with pytest.raises(ConfigError, match="lists tiny; name one"):
            connect(running.url, "nope")
        server, off = connect(running.url)
        assert off is not None and "speculation off" in name_of(off)
        certifier = ServerCertifier(server, off, PROMPTS[:2], Effort(requests=60, max_tokens=16))
        certifier.run()
        certificate = certifier.certificate()
        assert certificate.lossless, (certificate.verdict, certificate.problems)
