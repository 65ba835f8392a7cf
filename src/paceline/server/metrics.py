"""Prometheus metrics of requests, latencies, tokens, cache and speculation.

Counters and histograms are updated on the engine thread after each step; gauges are read when
scraped. Metrics of speculation have as labels the drafter's name, as requests know it, and the
adapter's.
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

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DECAY = 0.995  # a step of a sequence, of the means' sums: about the last two hundred


class Metrics:
    """The metrics of one ``EngineLoop``, in its own registry. ``alias_of``: also under vLLM's
    names, for the model of this name."""

    def __init__(self, alias_of: str | None = None) -> None:
        registry = self.registry = CollectorRegistry()
        self._alias_of = alias_of
        counter = partial(Counter, namespace="paceline", registry=registry)
        gauge = partial(Gauge, namespace="paceline", registry=registry)
        histogram = partial(Histogram, namespace="paceline", registry=registry)
        # requests
        text = "Requests that ended, by outcome: stop, length, cancelled, deadline, error."
        self.requests = counter("requests", text, ["outcome"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, once for all answers.")
        self.tokens = counter("generation_tokens", "Tokens written.")
        text = "Seconds from arrival to the first step of a request."
        self.queue_time = histogram("queue_seconds", text, buckets=_SLOW)
        text = "Seconds from arrival to the first token."
        self.first_token = histogram("time_to_first_token_seconds", text, buckets=_SLOW)
        text = "Seconds between two deliveries, divided by the tokens delivered together."
        self.token_gap = histogram("inter_token_latency_seconds", text, buckets=_FAST)
        text = "Seconds from arrival to the last token."
        self.request_time = histogram("request_seconds", text, buckets=_SLOW)
        # the engine
        self.running = gauge("requests_running", "Sequences being decoded.")
        self.waiting = gauge("requests_waiting", "Sequences that wait for room.")
        self.cache_usage = gauge("cache_usage_ratio", "Cache blocks in use, as a share.")
        # Labels as the Kubernetes inference gateway reads them, for any device.
        text = "1; the labels (block_size and others) say how the cache is laid out."
        self.cache_config = Info("paceline_cache_config", text, registry=registry)
        self.batch = histogram("batch_size", "Sequences of a step.", buckets=_SIZES)
        text = "Tokens of prompts that were cached already, once for all answers."
        self.prefix_hits = counter("prefix_cache_hit_tokens", text)
        text = "Sequences that gave up their cache and are read again."
        self.preemptions = counter("preemptions", text)
        text = f"Seconds of steps by phase: {', '.join(PHASES)}. Sequences share a step evenly."
        self.phase_seconds = counter("step_seconds", text, ["phase", "drafter"])
        # speculation
        spec = "spec_decode"
        labels = ["drafter", "adapter"]
        self.drafts = counter(f"{spec}_num_drafts", "Drafts verified.", labels)
        self.drafted = counter(f"{spec}_num_draft_tokens", "Tokens drafted.", labels)
        self.accepted = counter(f"{spec}_num_accepted_tokens", "Of these accepted.", labels)
        text = "1 from when acceptance collapsed until it has recovered, else 0."
        self.collapsed = gauge(f"{spec}_collapsed", text, labels)
        text, labels = "Drafts that got as far as a position.", ["drafter", "position"]
        self.drafted_at = counter(f"{spec}_num_draft_tokens_per_pos", text, labels)
        text = "Draft tokens accepted at a position."
        self.accepted_at = counter(f"{spec}_num_accepted_tokens_per_pos", text, labels)
        text = "Accepted by drafted tokens, of about the last two hundred steps."
        self.acceptance = gauge(f"{spec}_acceptance_rate", text, ["drafter"])
        text = "Tokens a target step, its own included; 1 is plain decoding."
        self.mean_length = gauge(f"{spec}_mean_accepted_length", text, ["drafter"])
        text = "Levels drafted a step, mean of about the last two hundred."
        self.draft_length = gauge(f"{spec}_draft_length", text, ["drafter"])
        # Decayed sums by drafter: steps, tokens, levels, drafted, accepted.
        self._recent: dict[str, tuple[float, ...]] = {}
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._before: Tally[str] = Tally()  # sequences of the step before, by drafter
        self._preempted = 0
        self._begun: set[int] = set()

    # -- the preparing threads -----------------------------------------------------------------

    def queued(self, requests: Sequence[Request]) -> None:
        # The n requests of a prompt share it: it counts once.
        self.prompt_tokens.inc(
            sum(request.seq.prompt_length for request in requests if request.index == 0)
        )

    # -- the engine thread ---------------------------------------------------------------------

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        self.batch.observe(len(advanced))
        sequences: Tally[str] = Tally()
        for request, commit in advanced:
            drafter = request.seq.params.drafter or next(iter(llm.drafters), "none")
            sequences[drafter] += 1
            self._started(request)
            if commit.tokens:
                self._committed(request, commit, drafter)
        self._clock(llm, sequences)
        preempted = llm.engine.scheduler.preemptions
        self.preemptions.inc(preempted - self._preempted)
        self._preempted = preempted

    def _started(self, request: Request) -> None:
        seq = request.seq
        if seq.seq_id not in self._begun:
            self._begun.add(seq.seq_id)
            self.queue_time.observe(max(0.0, seq.started - seq.queued))
            if request.index == 0:  # as ``prompt_tokens``
                self.prefix_hits.inc(seq.prefix_hit_tokens)

    def _committed(self, request: Request, commit: Commit, drafter: str) -> None:
        arrivals = request.seq.arrivals
        count = len(commit.tokens)
        self.tokens.inc(count)
        if len(arrivals) == 1:
            self.first_token.observe(arrivals[0][0] - request.seq.queued)
        else:
            gap = (arrivals[-1][0] - arrivals[-2][0]) / count
            for _ in range(count):
                self.token_gap.observe(gap)
        more = 1, count, commit.levels, commit.drafted, len(commit.path)
        recent = self._recent.get(drafter, (0.0,) * len(more))
        self._recent[drafter] = tuple(_DECAY * x + y for x, y in zip(recent, more, strict=True))
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

    def _clock(self, llm: LLM, sequences: Tally[str]) -> None:
        """Seconds of the step before this one: asking for this one's would wait for a GPU."""
        seconds = dict(llm.engine.clock.seconds)
        everyone = sum(self._before.values())
        for phase in PHASES:
            passed = max(0.0, seconds[phase] - self._phases[phase])
            for drafter, count in self._before.items():
                self.phase_seconds.labels(phase, drafter).inc(passed * count / everyone)
        self._phases, self._before = seconds, sequences

    def finished(self, request: Request, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled", "deadline" or "error"."""
        self.requests.labels(outcome).inc()
        self.request_time.observe(time.perf_counter() - request.seq.queued)
        self._begun.discard(request.seq.seq_id)

    # -- scraping --------------------------------------------------------------------------------

    def watch(self, engine: Engine, waiting: Callable[[], int]) -> None:
        """Let gauges read an engine's state when scraped."""
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


# Our names (after paceline_) to vLLM's (after vllm:), of which there may be two.
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
    """A registry's metrics by vLLM's names, labelled ``model_name``, summed over drafters."""

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
