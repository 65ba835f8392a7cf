"""Adapters over HTTP: chosen by the model's name, listed, loaded and unloaded beside requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from paceline import LLM, ConfigError, SamplingParams
from paceline.model.names import resolve
from paceline.server.config import ServeConfig
from support.asking import ask
from support.made_adapters import write_adapter
from support.running_server import MODEL, Running, serve, service_of

PROMPT = "Once upon a time, there was a little girl. Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "one", resolve("paceline/tiny"))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    options = {"dtype": "float32", "backend": "reference"}
    return LLM("paceline/tiny", "ngram", lora={"one": folder}, **options)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    yield from serve(service_of(llm, lora_updates=True))


@pytest.fixture(scope="module")
def fixed(llm: LLM) -> Iterator[Running]:
    yield from serve(service_of(llm.with_draft("ngram")))


def text(server: Running, model: str) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_a_request_names_an_adapter(server: Running, llm: LLM) -> None:
    asked = (SamplingParams(max_tokens=24, lora=name) for name in (None, "one"))
    base, adapted = (llm.generate(PROMPT, params)[0].text for params in asked)
    assert base != adapted
    assert [text(server, name) for name in (MODEL, "one", MODEL)] == [base, adapted, base]


def test_adapters_are_listed(server: Running, folder: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    cards = {card.id: card.to_dict() for card in client.models.list()}
    assert list(cards) == [MODEL, "one"]
    assert (cards["one"]["root"], cards["one"]["parent"]) == (folder, MODEL)
    assert client.models.retrieve("one").id == "one"


def test_loading_and_unloading(server: Running, folder: str) -> None:
    body = {"lora_name": "two", "lora_path": folder}
    assert ask(server.url, "/v1/load_lora_adapter", body).status == 200
    assert text(server, "two") == text(server, "one")
    again = ask(server.url, "/v1/load_lora_adapter", body)
    assert again.status == 400 and "loaded already" in again.error["message"]
    replaced = {**body, "load_inplace": True}
    assert ask(server.url, "/v1/load_lora_adapter", replaced).status == 200
    assert ask(server.url, "/v1/unload_lora_adapter", {"lora_name": "two"}).status == 200
    gone = ask(server.url, "/v1/unload_lora_adapter", {"lora_name": "two"})
    assert gone.status == 404 and "is not loaded" in gone.error["message"]
    with pytest.raises(openai.NotFoundError, match="'two' does not exist"):
        text(server, "two")


def test_changes_at_once(server: Running, folder: str) -> None:
    """One load of a name succeeds; what is listed after loads and unloads is loaded."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "four", "lora_path": folder}
    with ThreadPoolExecutor(8) as pool:
        done = pool.map(lambda _: ask(server.url, load, body).status, range(3))
        assert sorted(done) == [200, 400, 400]
        calls = [(load, {**body, "load_inplace": True}), (unload, {"lora_name": "four"})]
        list(pool.map(lambda call: ask(server.url, *call), calls))
    if "four" in {card["id"] for card in ask(server.url, "/v1/models").json["data"]}:
        assert text(server, "four") == text(server, "one")
        assert ask(server.url, unload, {"lora_name": "four"}).status == 200


def test_what_is_no_adapter_is_refused(server: Running, tmp_path: Path) -> None:
    body = {"lora_name": "three", "lora_path": str(tmp_path)}
    refused = ask(server.url, "/v1/load_lora_adapter", body)
    assert refused.status == 400 and "adapter_config.json" in refused.error["message"]
    body["lora_name"] = MODEL
    assert ask(server.url, "/v1/load_lora_adapter", body).status == 400


def test_only_a_server_that_says_so_loads(fixed: Running, folder: str) -> None:
    body = {"lora_name": "two", "lora_path": folder}
    refused = ask(fixed.url, "/v1/load_lora_adapter", body)
    assert refused.status == 403 and "--lora-updates" in refused.error["message"]


def test_metrics_by_adapter(server: Running) -> None:
    text(server, "one")
    metrics = ask(server.url, "/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        labels = '{adapter="one",drafter="ngram"}'
        assert f"paceline_spec_decode_num_{name}_total{labels}" in metrics


@pytest.mark.parametrize("pair", ["sql", "=folder", "sql=", "paceline/tiny=folder"])
def test_wrong_settings(pair: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME=FOLDER|both called"):
        ServeConfig(model="paceline/tiny", lora=(pair,))
