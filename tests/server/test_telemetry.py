"""OpenTelemetry, read back from the SDK's own in-memory exporters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM
from paceline.server.app import create_app
from paceline.server.telemetry import Telemetry
from support.asking import ask
from support.running_server import MODEL, Running, serve, service_of

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collected:
    def __init__(self) -> None:
        self.spans, self.metrics = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry = Telemetry(MODEL, tracers, MeterProvider([self.metrics]))

    def points(self) -> dict[str, list[Any]]:
        data = self.metrics.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def collected() -> Collected:
    return Collected()


@pytest.fixture
def traced(target: LLM, collected: Collected) -> Iterator[Running]:
    service = service_of(target.with_draft("ngram"))
    yield from serve(service, on_end=collected.telemetry)


def test_a_span_for_every_request(traced: Running, collected: Collected) -> None:
    body = {
        "messages": [{"role": "user", "content": "A secret"}],
        "max_tokens": 5,
        "temperature": 0,
        "seed": 3,
        "n": 2,
    }
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    for stream in (False, True):
        answer = ask(traced.url, "/v1/chat/completions", {**body, "stream": stream}, parent)
        assert answer.status == 200
    ask(traced.url, "/v1/completions", {"prompt": "Once", "max_tokens": 1, "model": "other"})
    ask(traced.url, "/health")
    whole, streamed, refused = collected.spans.get_finished_spans()
    for span in (whole, streamed):
        assert span.name == f"chat {MODEL}" and span.kind.name == "SERVER"
        assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        said = span.attributes
        assert said["gen_ai.operation.name"] == "chat"
        assert said["gen_ai.usage.output_tokens"] == 10
        assert said["gen_ai.request.max_tokens"] == 5 and said["gen_ai.request.seed"] == 3
        assert said["gen_ai.response.finish_reasons"] == ("length", "length")
        assert said["paceline.drafter"] == "ngram" and said["http.response.status_code"] == 200
        assert "secret" not in str(said)
        assert 0 < span.end_time - span.start_time < 60e9
    assert refused.attributes["error.type"] == "404" and refused.parent is None


def test_the_metrics(traced: Running, collected: Collected) -> None:
    body = {"prompt": ["Once", "Twice"], "max_tokens": 4, "temperature": 0}
    assert ask(traced.url, "/v1/completions", body).status == 200
    points = collected.points()
    (duration,) = points["gen_ai.server.request.duration"]
    (first,) = points["gen_ai.server.time_to_first_token"]
    (point,) = points["gen_ai.server.time_per_output_token"]
    assert (duration.count, first.count, point.count) == (1, 2, 2)
    assert 0 < first.max <= duration.max and 0 < point.max < duration.max
    assert first.attributes["gen_ai.request.model"] == MODEL
    assert duration.explicit_bounds[0] == 0.01


def test_an_application_without_it_is_none_the_wiser(target: LLM) -> None:
    assert create_app(service_of(target.with_draft())) is not None
