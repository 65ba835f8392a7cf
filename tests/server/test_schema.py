"""schemathesis over our own OpenAPI document: whatever is sent, no 5xx, answers as documented.

SCHEMA_EXAMPLES=500 python -m pytest -s tests/server/test_schema.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from paceline import LLM
from support.running_server import MODEL, Running, serve, service_of

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "0"))
STATUSES: Counter[int] = Counter()
PATHS = (
    "/v1/responses",
    "/v1/responses/{name}",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenizer_info",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/health/ready",
    "/version",
    "/metrics",
    "/load",
)


@pytest.fixture(scope="module")
def fuzzed(target: LLM) -> Iterator[Running]:
    llm = target.with_draft("auto", max_batch_size=8)
    yield from serve(service_of(llm, deadline=20.0))


@pytest.fixture(scope="module")
def api(fuzzed: Running) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


def tamed(body: Any) -> Any:
    """Mostly our own model, and short answers; what is malformed on purpose stays so."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(name)) is int:
                body[name] = min(body[name], 4)
        # Null is all that fits, which a busy machine ends with 504; without it completions have 16.
        default = 16 if "prompt" in body else None
        if {"messages", "prompt"} & body.keys() and body.get("max_tokens", default) is None:
            body["max_tokens"] = 4
        if "input" in body and body.get("max_output_tokens") is None:
            body["max_output_tokens"] = 4
        if type(body.get("n")) is int:
            body["n"] = min(body["n"], 2)
    return body


def check(case: Any) -> None:
    case.body = tamed(case.body)
    response = case.call(timeout=30)
    STATUSES[response.status_code] += 1
    checks = schemathesis.checks
    case.validate_response(
        response, checks=[checks.not_a_server_error, checks.response_schema_conformance]
    )
    if response.status_code >= 400:
        error = response.json()["error"]
        assert {"message", "type"} <= set(error) <= {"message", "type", "param", "code"}
        assert "\n" not in error["message"] and "Traceback" not in error["message"]


# Not by its pytest plugin, which lags behind pytest.
@pytest.mark.parametrize("path", PATHS)
def test_no_server_errors(api: Any, path: str) -> None:
    for method, operation in api[path].items():
        strategy = operation.as_strategy()
        options = settings(
            max_examples=EXAMPLES or 10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=not EXAMPLES,
            database=None,
        )
        options(given(case=strategy)(check))()
        assert method.upper() in ("GET", "POST", "DELETE")


def test_every_path_is_covered(api: Any) -> None:
    assert set(api) == set(PATHS)


def test_the_server_is_as_well_as_before(fuzzed: Running) -> None:
    """Runs last: nothing is left of all that."""
    assert fuzzed.service.client.alive and fuzzed.service.client.idle
    print(f"{STATUSES.total()} requests: {dict(STATUSES.most_common())}")
    pool = fuzzed.service.client.engine.llm.engine.cache.pool
    assert pool.available == pool.total
