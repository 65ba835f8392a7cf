"""OpenTelemetry: a span for each generation request, and the metrics ``gen_ai.server.*``.

Names follow the semantic conventions for generative AI. If a client sends a ``traceparent``, its
span is the parent. Prompts and answers are never exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from paceline import __version__
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from paceline.server.client import Ticket
    from paceline.server.requestlog import Exchange

_OPERATIONS = {
    "/v1/completions": "text_completion",
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
}
_SYSTEM = "paceline"
# Bucket bounds of the histograms in seconds, as the conventions advise: of requests (0.01 to
# 81.92), and of single tokens.
_DURATIONS = tuple(0.01 * 2**doubled for doubled in range(14))
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Telemetry:
    """Records requests as traces and metrics; called by ``RequestLog`` at the end of each."""

    def __init__(self, model: str, tracers: TracerProvider, meters: MeterProvider) -> None:
        self._model = model
        self._tracer = tracers.get_tracer(_SYSTEM, __version__)
        meter = meters.get_meter(_SYSTEM, __version__)
        self._duration, self._first, self._per_token = (
            meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=bounds
            )
            for name, text, bounds in (
                ("request.duration", "From request to last token.", _DURATIONS),
                ("time_to_first_token", "From request to first token.", _DURATIONS),
                ("time_per_output_token", "Of those after the first.", _TOKEN_TIMES),
            )
        )

    @classmethod
    def to(cls, endpoint: str, model: str) -> Telemetry:
        """Export to an OTLP collector over HTTP. Raises ConfigError if the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "otlp_endpoint needs OpenTelemetry's SDK; run pip install 'paceline[otlp]', or "
                "leave it out"
            ) from None
        base = endpoint.rstrip("/")
        resource = Resource.create({"service.name": _SYSTEM, "service.version": __version__})
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics"))
        return cls(model, tracers, MeterProvider([reader], resource=resource))

    def __call__(self, exchange: Exchange) -> None:
        operation = _OPERATIONS.get(exchange.scope["path"].rstrip("/"))
        if operation is None:
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        shared: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.system": _SYSTEM,
            "gen_ai.provider.name": _SYSTEM,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        if exchange.status >= 400:
            shared["error.type"] = str(exchange.status)
        self._duration.record(exchange.seconds, shared)
        for completion in exchange.ticket.completions if exchange.ticket else ():
            stats, later_tokens = completion.stats, len(completion.token_ids) - 1
            first = stats.time_to_first_token
            self._first.record(first, shared)
            if later_tokens > 0:
                seconds = (stats.arrivals[-1][0] - first) / later_tokens
                self._per_token.record(seconds, shared)
        name, parent = f"{operation} {self._model}", extract(Headers(scope=exchange.scope))
        start = int(exchange.started_at * 1e9)  # nanoseconds
        attributes = {
            **shared,
            "http.request.method": exchange.scope["method"],
            "url.path": exchange.scope["path"],
            "http.response.status_code": exchange.status,
            "paceline.request_id": exchange.id,
            **_attributes(exchange.ticket),
        }
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start)
        if exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(start + int(exchange.seconds * 1e9))


def _attributes(ticket: Ticket | None) -> dict[str, Any]:
    """The attributes of a span: parameters of the request and figures of its completions."""
    if ticket is None:
        return {}
    params, done = ticket.params, ticket.completions
    return {
        **({} if params.seed is None else {"gen_ai.request.seed": params.seed}),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": ticket.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in done),
        "gen_ai.response.finish_reasons": [completion.finish_reason for completion in done],
        "paceline.drafter": ticket.drafter,
        "paceline.drafted_tokens": sum(completion.stats.drafted_tokens for completion in done),
        "paceline.accepted_tokens": sum(completion.stats.accepted_tokens for completion in done),
    }
