"""Prometheus metrics of requests, latencies, tokens, the cache and speculative decoding.

Counters and histograms are updated on the engine thread after each step; gauges are computed when
they are scraped. Metrics of speculative decoding have the labels ``drafter`` (the name by which
requests choose it) and ``adapter``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from paceline.core.batch import Commit
from paceline.files import read_toml

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.llm import LLM
    from paceline.request.request import Request

_FILE = read_toml(Path(__file__).with_name("metrics.toml"), "the table of metrics")
_TABLE, _BUCKETS = _FILE["metrics"], _FILE["buckets"]


class Metrics:
    """The metrics of one ``EngineLoop``, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
        return generate_latest(self.registry).decode()
