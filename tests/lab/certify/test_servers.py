"""Servers are certified by their answers: each planted fault is found and named, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from paceline.errors import ConfigError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import Certificate
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.server import ServerCertifier, check_greedy, lacks_of
from paceline.lab.certify.session import Part, connect, name_of
from paceline.lab.openai_client import (
    AnswerChoice,
    AnswerToken,
    OpenAIClient,
    ServerFailedError,
    choices_of,
)
from support.diagonal import diagonal
from support.planted_server import FAULTS, PlantedServer, served

PROMPTS = [("one", "Once upon a time"), ("two", "What is said of"), ("three", "It is")]
EFFORT = Effort(requests=150, max_tokens=24)


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
        assert any(what.startswith("streams: ") for what in said)
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
    ],
    ids=str,
)
def test_choices_outside_the_protocol_are_failures_of_the_server(answer: dict[str, Any]) -> None:
    with pytest.raises(ServerFailedError):
        choices_of(answer)


@pytest.mark.parametrize("compared", [True, False])
def test_a_correct_server_is_certified(compared: bool) -> None:
    certificate = outcome(PlantedServer(), PlantedServer(seed=8) if compared else None)
    assert certificate.lossless, certificate.verdict
    assert certificate.verdict.startswith("CERTIFIED: ")
    assert {part.name for part in certificate.rows("parts")} == {*FAULTS.values()}
    assert all(part.checked and part.requests for part in certificate.rows("parts"))
    assert len(certificate.rows("tests")) == 1
    assert all(0 < test.smallest_bias < 0.3 for test in certificate.rows("tests"))
    record = json.loads(json.dumps(certificate.record()))
    assert record["lossless"] and record["problems"] == []
    assert sum(part["requests"] for part in record["parts"]) <= EFFORT.requests
    assert certificate.report().sections[0].title == "Parts"


@pytest.mark.parametrize(
    "planted",
    [
        PlantedServer(logprobs="records"),
        PlantedServer(strict=True),
        PlantedServer(cuts=True),
    ],
    ids=["records", "strict", "cuts"],
)
def test_formats_of_other_servers_are_accepted(planted: PlantedServer) -> None:
    """llama.cpp's format of logprobs, its default top-k, and OpenAI's refusals."""
    certificate = outcome(planted, effort=Effort(requests=250, max_tokens=24))
    assert certificate.lossless, (certificate.verdict, certificate.problems)
    assert certificate.rows("tests")[0].samples > 200


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


def test_ignored_penalties_are_detected_with_a_reference() -> None:
    certificate = outcome(PlantedServer("unpenalised"), PlantedServer(seed=8))
    assert {problem.part for problem in certificate.problems} == {"limits"}
    assert "with penalties" in certificate.problems[0].what


def test_a_near_tie_is_not_an_error() -> None:
    """Two words a tenth of a nat apart, which rounding may swap."""

    def two_words(second: str, logprob: float, likeliest: dict[str, float]) -> AnswerChoice:
        first = AnswerToken("a", -0.1, {"a": -0.1})
        return AnswerChoice(
            f"a{second}", "length", (first, AnswerToken(second, logprob, likeliest))
        )

    likeliest = {" b": -0.7, " c": -0.8}
    one, other = two_words(" b", -0.7, likeliest), two_words(" c", -0.8, likeliest)
    part = Part("greedy", "texts", check_greedy)
    assert [*part.compare(one, one)] == [] and part.ties == 0
    assert [*part.compare(one, other)] == [] and part.ties == 1
    far = two_words(" b", -0.1, {" b": -0.1, " c": -4.0})
    (problem,) = part.compare(other, far)
    assert problem == "token 1 is ' c', expected ' b', which is 3.90 nats likelier"
    (problem,) = part.compare(one, replace(one, text="a", tokens=one.tokens[:1]))
    assert problem == "one text ends after 1 tokens" and part.ties == 1


def test_missing_logprobs_and_chats_are_noted() -> None:
    certificate = outcome(PlantedServer(chats=False, logprobs=None), PlantedServer(seed=8))
    notes = certificate.notes
    assert not certificate.problems, certificate.problems
    assert any("no logprobs" in note for note in notes)
    assert any("no chats here" in note for note in notes)
    assert certificate.verdict.startswith("NOT ENOUGH: no positions for logprobs")


def test_a_server_that_is_slow_is_not_called_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeout was "NOT LOSSLESS: greedy: one: TimeoutError: timed out"."""
    late = iter([TimeoutError("timed out"), URLError(TimeoutError("timed out"))])

    def answer(request: Request, timeout: float) -> Any:
        if request.data and (error := next(late, None)):
            raise error
        return urlopen(request, timeout=timeout)

    monkeypatch.setattr("paceline.lab.openai_client.urlopen", answer)
    certificate = outcome(PlantedServer())
    assert not certificate.problems and not certificate.lossless
    assert "without an answer in time" in certificate.verdict
    assert certificate.verdict.startswith("NOT ENOUGH: ")


def test_a_server_that_hangs_ends_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for to the end of the request's own timeout, 120 s behind the budget."""
    now, waited = [0.0], []

    def answer(request: Request, timeout: float) -> Any:
        if not request.data:
            return urlopen(request, timeout=timeout)
        waited.append(timeout)
        now[0] += timeout
        raise TimeoutError("timed out")

    monkeypatch.setattr("paceline.lab.openai_client.urlopen", answer)
    with served(PlantedServer()) as url:
        budget = Budget(150.0, clock=lambda: now[0])
        certifier = ServerCertifier(connect(url)[0], None, PROMPTS, EFFORT, budget)
        certifier.run()
    assert waited == [120.0, 30.0] and certifier.budget.left == 0
    verdict = certifier.certificate().verdict
    assert verdict.startswith("NOT ENOUGH: ") and "greedy: 1 without an answer in time" in verdict


def test_too_few_requests_certify_nothing() -> None:
    certificate = outcome(PlantedServer(), effort=Effort(requests=4, max_tokens=8))
    assert certificate.verdict.startswith("NOT ENOUGH: ")
    assert (
        not certificate.problems and sum(part.requests for part in certificate.rows("parts")) <= 4
    )


def test_samples_without_power_certify_nothing() -> None:
    certificate = outcome(PlantedServer())
    assert certificate.lossless
    assert not lacks_of(certificate.rows("parts"), certificate.rows("tests"))
    for tests in ((), (replace(certificate.rows("tests")[0], smallest_bias=0.4),)):
        (lack,) = lacks_of(certificate.rows("parts"), tests)
        assert "or more would have been detected in the samples" in lack
        blind = replace(certificate, missing_evidence=(lack,))
        assert not blind.lossless and blind.verdict.startswith(f"NOT ENOUGH: {lack}")
    greedy, *others = certificate.rows("parts")
    for texts in (0, 1):
        few = replace(greedy, checked=texts), *others
        assert lacks_of(few, certificate.rows("tests")) == [f"whole texts compared: {texts}, not 2"]


def test_addresses_without_a_server() -> None:
    with pytest.raises(ConfigError, match="no server answers at"):
        connect("http://127.0.0.1:9", timeout=2)
    with pytest.raises(ConfigError, match="is no URL"):
        connect("localhost:8000")
    with pytest.raises(ConfigError, match="requests is 0"):
        Effort(requests=0)


def test_our_own_server_with_and_without_speculation() -> None:
    from paceline import LLM
    from support.running_server import serve, service_of

    llm = LLM("paceline/tiny", "ngram", dtype="float32")
    for running in serve(service_of(llm, "tiny")):
        with pytest.raises(ConfigError, match="lists not nope, but tiny; name one"):
            connect(running.url, "nope")
        server, off = connect(running.url)
        assert off is not None and "speculation off" in name_of(off)
        certifier = ServerCertifier(server, off, PROMPTS[:2], Effort(requests=60, max_tokens=16))
        certifier.run()
        certificate = certifier.certificate()
        assert certificate.lossless, (certificate.verdict, certificate.problems)
