"""The metrics once more under vLLM's names, for dashboards and autoscalers that look for those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Of ours (behind paceline_) to theirs (behind vllm:); a name may be two.
_NAMES: Mapping[str, tuple[str, ...]] = {
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
    """Reads a registry and says the same with the label ``model_name``; drafters are added up."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model, self._reading = registry, model, False

    def collect(self) -> Iterable[Metric]:
        if self._reading:  # it is one of the registry's own
            return []
        self._reading = True
        try:
            metrics = {metric.name: metric for metric in self._registry.collect()}
        finally:
            self._reading = False
        return [
            self._renamed(metrics[f"paceline_{ours}"], f"paceline_{ours}", f"vllm:{theirs}")
            for ours, names in _NAMES.items()
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
