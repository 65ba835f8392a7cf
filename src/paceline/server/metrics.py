"""Prometheus metrics of requests, latencies, tokens, the cache and speculative decoding.

Counters and histograms are updated on the engine thread after each step; gauges are computed when
they are scraped. Metrics of speculative decoding have the labels ``drafter`` (the name by which
requests choose it) and ``adapter``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.core.batch import Commit
from paceline.files import read_toml

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.llm import LLM
    from paceline.request.request import Request

_FILE = read_toml(Path(__file__).with_name("metrics.toml"), "the table of metrics")
_TABLE, _BUCKETS = _FILE["metrics"], _FILE["buckets"]
# vLLM's names (after vllm:) for each of our metrics (after paceline_). Some have two.
VLLM_NAMES: Mapping[str, Sequence[str]] = {
    name: row["vllm"] for name, row in _TABLE.items() if "vllm" in row
}


class Metrics:
    """The metrics of one ``EngineLoop``, in their own registry. If ``alias_of`` is given, they are
    also rendered under vLLM's names, for a model of that name."""

    def __init__(self, alias_of: str | None = None) -> None:
        self.registry, self._alias_of = CollectorRegistry(), alias_of
        self.named: dict[str, Any] = {name: self._new(name, **row) for name, row in _TABLE.items()}
        self._preempted = 0
        self._started: set[int] = set()  # sequences that have been in a step

    def _new(self, name: str, kind: str, help: str, labels: Sequence[str] = (), **more: Any) -> Any:
        """Make the metric of a row of the table."""
        buckets = {"buckets": _BUCKETS[more["buckets"]]} if "buckets" in more else {}
        make = getattr(prometheus_client, kind)
        return make(name, help, labels, namespace="paceline", registry=self.registry, **buckets)

    # -- called on the worker threads that prepare requests ------------------------------------

    def record_queued(self, requests: Sequence[Request]) -> None:
        # The n requests of a prompt share it, so it counts once.
        self.named["prompt_tokens"].inc(
            sum(request.seq.prompt_length for request in requests if request.index == 0)
        )

    # -- called on the engine thread -----------------------------------------------------------

    def record_step(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        self.named["batch_size"].observe(len(advanced))
        for request, commit in advanced:
            drafter = request.seq.params.drafter or next(iter(llm.drafters), "none")
            if (seq := request.seq).seq_id not in self._started:
                self._started.add(seq.seq_id)
                self.named["queue_seconds"].observe(max(0.0, seq.started - seq.queued))
                if request.index == 0:  # a prompt counts once, as in ``prompt_tokens``
                    self.named["prefix_cache_hit_tokens"].inc(seq.prefix_hit_tokens)
            if commit.tokens:
                self._record_commit(request, commit, drafter)
        preempted = llm.engine.scheduler.preemptions
        self.named["preemptions"].inc(preempted - self._preempted)
        self._preempted = preempted

    def _record_commit(self, request: Request, commit: Commit, drafter: str) -> None:
        arrivals = request.seq.arrivals
        count = len(commit.tokens)
        self.named["generation_tokens"].inc(count)
        if len(arrivals) == 1:
            self.named["time_to_first_token_seconds"].observe(arrivals[0][0] - request.seq.queued)
        else:
            gap = (arrivals[-1][0] - arrivals[-2][0]) / count
            for _ in range(count):
                self.named["inter_token_latency_seconds"].observe(gap)
        if not commit.drafted:
            return
        labels = drafter, request.seq.adapter.name if request.seq.adapter else ""
        counts = {"drafts": 1, "draft_tokens": commit.drafted, "accepted_tokens": len(commit.path)}
        for name, number in counts.items():
            self.named[f"spec_decode_num_{name}"].labels(*labels).inc(number)
        for position in range(commit.reached):
            accepted = position < len(commit.path)
            for name in ("draft", "accepted") if accepted else ("draft",):
                by_position = self.named[f"spec_decode_num_{name}_tokens_per_pos"]
                by_position.labels(drafter, position).inc()

    def record_finished(self, request: Request, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled", "deadline" or "error"."""
        self.named["requests"].labels(outcome).inc()
        self.named["request_seconds"].observe(time.perf_counter() - request.seq.queued)
        self._started.discard(request.seq.seq_id)

    # -- scraping --------------------------------------------------------------------------------

    def watch_engine(self, engine: Engine, waiting: Callable[[], int]) -> None:
        """Have the gauges read the engine's state when they are scraped."""
        cache, pool = engine.cache, engine.cache.pool
        self.named["requests_running"].set_function(lambda: len(engine.scheduler.running))
        self.named["requests_waiting"].set_function(waiting)
        self.named["cache_usage_ratio"].set_function(lambda: 1 - pool.available / pool.total)
        self.named["cache_config"].info(
            {
                "block_size": str(cache.block_size),
                "num_gpu_blocks": str(cache.num_blocks),
                "enable_prefix_caching": str(cache.shares),
            }
        )

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        rendered: list[Collector] = [self.registry]
        if self._alias_of is not None:
            rendered.append(VllmNames(self.registry, self._alias_of))
        return b"".join(map(generate_latest, rendered)).decode()


_KEPT_LABELS = "position", "le", "block_size", "num_gpu_blocks", "enable_prefix_caching"
_LABELS = {"outcome": "finished_reason", **{name: name for name in _KEPT_LABELS}}


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
