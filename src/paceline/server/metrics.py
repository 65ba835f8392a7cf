"""Prometheus metrics of requests, latencies, tokens, the cache and speculative decoding.

Counters and histograms are updated on the engine thread after each step; gauges are computed when
they are scraped. Metrics of speculative decoding have the labels ``drafter`` (the name by which
requests choose it) and ``adapter``.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.core.batch import Commit
from paceline.engine.clock import PHASES

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.llm import LLM
    from paceline.request.request import Request

# Bucket bounds: seconds per token, seconds per request, and batch sizes.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DECAY = 0.995  # of moving sums, for each step of a sequence: about the last two hundred count


class Metrics:
    """The metrics of one ``EngineLoop``, in their own registry. If ``alias_of`` is given, they are
    also rendered under vLLM's names, for a model of that name."""

    def __init__(self, alias_of: str | None = None) -> None:
        registry = self.registry = CollectorRegistry()
        self._alias_of = alias_of
        counter = partial(Counter, namespace="paceline", registry=registry)
        gauge = partial(Gauge, namespace="paceline", registry=registry)
        histogram = partial(Histogram, namespace="paceline", registry=registry)
        # requests
        text = "Requests that ended, by outcome: stop, length, cancelled, deadline, error."
        self.requests = counter("requests", text, ["outcome"])
        text = "Prompt tokens; a prompt counts once, however many completions it has."
        self.prompt_tokens = counter("prompt_tokens", text)
        self.tokens = counter("generation_tokens", "Generated tokens.")
        text = "Seconds from arrival to the first step of a request."
        self.queue_time = histogram("queue_seconds", text, buckets=_REQUEST_SECONDS)
        text = "Seconds from arrival to the first token."
        self.first_token = histogram("time_to_first_token_seconds", text, buckets=_REQUEST_SECONDS)
        text = "Seconds between two steps with tokens, divided by the tokens of the later step."
        self.token_gap = histogram("inter_token_latency_seconds", text, buckets=_TOKEN_SECONDS)
        text = "Seconds from arrival to the last token."
        self.request_time = histogram("request_seconds", text, buckets=_REQUEST_SECONDS)
        # the engine
        self.running = gauge("requests_running", "Sequences being decoded.")
        self.waiting = gauge("requests_waiting", "Sequences waiting to be scheduled.")
        self.cache_usage = gauge("cache_usage_ratio", "Share of the cache blocks in use.")
        # The labels are those that the Kubernetes inference gateway reads, on any device.
        text = "Always 1; the labels (block_size and others) give the layout of the cache."
        self.cache_config = Info("paceline_cache_config", text, registry=registry)
        self.batch = histogram("batch_size", "Sequences in a step.", buckets=_BATCH_SIZES)
        text = "Prompt tokens found in the prefix cache; a prompt counts once."
        self.prefix_hits = counter("prefix_cache_hit_tokens", text)
        text = "Sequences whose cache blocks were taken away and that are prefilled again."
        self.preemptions = counter("preemptions", text)
        text = f"Seconds of steps by phase: {', '.join(PHASES)}; divided evenly between sequences."
        self.phase_seconds = counter("step_seconds", text, ["phase", "drafter"])
        # speculation
        spec = "spec_decode"
        labels = ["drafter", "adapter"]
        self.drafts = counter(f"{spec}_num_drafts", "Drafts verified.", labels)
        self.drafted = counter(f"{spec}_num_draft_tokens", "Draft tokens.", labels)
        self.accepted = counter(f"{spec}_num_accepted_tokens", "Accepted draft tokens.", labels)
        text = "1 while the acceptance of the drafter has collapsed, otherwise 0."
        self.collapsed = gauge(f"{spec}_collapsed", text, labels)
        labels = ["drafter", "position"]
        text = "Drafts of which all tokens before a position were accepted."
        self.drafted_at = counter(f"{spec}_num_draft_tokens_per_pos", text, labels)
        text = "Draft tokens accepted at a position."
        self.accepted_at = counter(f"{spec}_num_accepted_tokens_per_pos", text, labels)
        text = "Share of draft tokens that were accepted, over about the last two hundred steps."
        self.acceptance = gauge(f"{spec}_acceptance_rate", text, ["drafter"])
        text = "Tokens per target step, including the target's own; plain decoding has 1."
        self.mean_length = gauge(f"{spec}_mean_accepted_length", text, ["drafter"])
        text = "Mean draft depth, over about the last two hundred steps."
        self.draft_length = gauge(f"{spec}_draft_length", text, ["drafter"])
        # Decayed sums by drafter: steps, tokens, draft depths, draft tokens, accepted tokens.
        self._recent: dict[str, tuple[float, ...]] = {}
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._last_step: Tally[str] = Tally()  # number of sequences by drafter
        self._preempted = 0
        self._started: set[int] = set()  # sequences that have been in a step

    # -- called on the worker threads that prepare requests ------------------------------------

    def record_queued(self, requests: Sequence[Request]) -> None:
        # The n requests of a prompt share it, so it counts once.
        self.prompt_tokens.inc(
            sum(request.seq.prompt_length for request in requests if request.index == 0)
        )

    # -- called on the engine thread -----------------------------------------------------------

    def record_step(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        self.batch.observe(len(advanced))
        sequences: Tally[str] = Tally()
        for request, commit in advanced:
            drafter = request.seq.params.drafter or next(iter(llm.drafters), "none")
            sequences[drafter] += 1
            self._record_start(request)
            if commit.tokens:
                self._record_commit(request, commit, drafter)
        self._record_phases(llm, sequences)
        preempted = llm.engine.scheduler.preemptions
        self.preemptions.inc(preempted - self._preempted)
        self._preempted = preempted

    def _record_start(self, request: Request) -> None:
        seq = request.seq
        if seq.seq_id not in self._started:
            self._started.add(seq.seq_id)
            self.queue_time.observe(max(0.0, seq.started - seq.queued))
            if request.index == 0:  # a prompt counts once, as in ``prompt_tokens``
                self.prefix_hits.inc(seq.prefix_hit_tokens)

    def _record_commit(self, request: Request, commit: Commit, drafter: str) -> None:
        arrivals = request.seq.arrivals
        count = len(commit.tokens)
        self.tokens.inc(count)
        if len(arrivals) == 1:
            self.first_token.observe(arrivals[0][0] - request.seq.queued)
        else:
            gap = (arrivals[-1][0] - arrivals[-2][0]) / count
            for _ in range(count):
                self.token_gap.observe(gap)
        new = 1, count, commit.levels, commit.drafted, len(commit.path)
        recent = self._recent.get(drafter, (0.0,) * len(new))
        self._recent[drafter] = tuple(_DECAY * x + y for x, y in zip(recent, new, strict=True))
        if not commit.drafted:
            return
        labels = drafter, request.seq.adapter.name if request.seq.adapter else ""
        self.drafts.labels(*labels).inc()
        self.drafted.labels(*labels).inc(commit.drafted)
        self.accepted.labels(*labels).inc(len(commit.path))
        for position in range(commit.reached):
            self.drafted_at.labels(drafter, position).inc()
            if position < len(commit.path):
                self.accepted_at.labels(drafter, position).inc()

    def _record_phases(self, llm: LLM, sequences: Tally[str]) -> None:
        """Record the times of the previous step: reading those of the current one would wait for
        the GPU."""
        seconds = dict(llm.engine.clock.seconds)
        total = sum(self._last_step.values())
        for phase in PHASES:
            elapsed = max(0.0, seconds[phase] - self._phases[phase])
            for drafter, count in self._last_step.items():
                self.phase_seconds.labels(phase, drafter).inc(elapsed * count / total)
        self._phases, self._last_step = seconds, sequences

    def record_finished(self, request: Request, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled", "deadline" or "error"."""
        self.requests.labels(outcome).inc()
        self.request_time.observe(time.perf_counter() - request.seq.queued)
        self._started.discard(request.seq.seq_id)

    # -- scraping --------------------------------------------------------------------------------

    def watch_engine(self, engine: Engine, waiting: Callable[[], int]) -> None:
        """Have the gauges read the engine's state when they are scraped."""
        cache, pool = engine.cache, engine.cache.pool
        self._watch = engine.watch
        self.running.set_function(lambda: len(engine.scheduler.running))
        self.waiting.set_function(waiting)
        self.cache_usage.set_function(lambda: 1 - pool.available / pool.total)
        self.cache_config.info(
            {
                "block_size": str(cache.block_size),
                "num_gpu_blocks": str(cache.num_blocks),
                "enable_prefix_caching": str(cache.shares),
            }
        )

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        self.collapsed.clear()
        for key in [*((name, None, 0) for name in self._watch.drafters), *self._watch.warned]:
            name, adapter, _ = key
            self.collapsed.labels(name, adapter or "").set(key in self._watch.collapsed)
        for drafter, (steps, tokens, levels, drafted, accepted) in self._recent.copy().items():
            self.mean_length.labels(drafter).set(tokens / steps)
            self.draft_length.labels(drafter).set(levels / steps)
            if drafted:
                self.acceptance.labels(drafter).set(accepted / drafted)
        rendered: list[Collector] = [self.registry]
        if self._alias_of is not None:
            rendered.append(VllmNames(self.registry, self._alias_of))
        return b"".join(map(generate_latest, rendered)).decode()


# vLLM's names (after vllm:) for each of our metrics (after paceline_). Some have two.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "cache_config": ("cache_config",),
    "requests": ("request_success",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "prefix_cache_hit_tokens": ("prefix_cache_hits",),
    "generation_tokens": ("generation_tokens",),
    "preemptions": ("num_preemptions",),
    "queue_seconds": ("request_queue_time_seconds",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_seconds": ("e2e_request_latency_seconds",),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
}
_LABELS = {
    "outcome": "finished_reason",
    **{name: name for name in ("position", "le", "block_size", "num_gpu_blocks")},
    "enable_prefix_caching": "enable_prefix_caching",
}


class VllmNames(Collector):
    """The metrics of a registry under vLLM's names, with the label ``model_name``; the labels that
    vLLM does not have, such as the drafter, are summed over."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterable[Metric]:
        metrics = {metric.name: metric for metric in self._registry.collect()}
        return [
            self._renamed(metrics[f"paceline_{ours}"], f"paceline_{ours}", f"vllm:{theirs}")
            for ours, names in VLLM_NAMES.items()
            for theirs in names
        ]

    def _renamed(self, metric: Metric, ours: str, theirs: str) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in metric.samples:
            labels = {_LABELS[k]: v for k, v in sample.labels.items() if k in _LABELS}
            name = theirs + sample.name.removeprefix(ours)
            if not name.endswith("_created"):
                sums[name, tuple(sorted(labels.items()))] += sample.value
        renamed = Metric(theirs, metric.documentation, metric.type)
        for (name, pairs), value in sums.items():
            renamed.add_sample(
                name, {"model_name": self._model, "engine": "0", **dict(pairs)}, value
            )
        return renamed
