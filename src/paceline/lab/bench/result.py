"""The result of a benchmark: figures (medians over rounds, with their spread), the comparison of
texts with plain decoding's, and its JSON object."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import JobResult, Method, TimedRun, merged
from paceline.lab.budget import Spending
from paceline.lab.certify.decoding import first_difference
from paceline.lab.report.document import Spread
from paceline.llm import LLM
from paceline.model.backends.base import NATIVE

OVERALL = "overall"
_MIN_PROMPTS = 4  # for a confidence interval
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Row:
    """One method on one category at one concurrency and temperature. Times in seconds.

    ``speedup``: over plain decoding in the same jobs and rounds (``jobs_per_round``).
    ``interval``: 95 % confidence interval of the speedup, by bootstrap over prompts; None for few
    prompts, or several requests at once. ``mean_speedup``: as Spec-Bench computes it (speed.py),
    the mean over jobs of tokens per second divided by plain decoding's mean. ``inter_token_*``:
    percentiles over tokens of the gap before a delivery divided by the tokens delivered together.
    ``stall_p99``: percentile of undivided gaps."""

    method: str
    category: str
    concurrency: int
    temperature: float
    rounds: int
    jobs_per_round: int
    requests: int
    tokens: int
    tokens_per_second: Spread
    speedup: Spread
    interval: tuple[float, float] | None
    mean_speedup: float
    time_to_first_token: float
    inter_token_p50: float | None
    inter_token_p99: float | None
    stall_p99: float | None
    drafts: dict[str, Any]


def rows(record: list[JobResult]) -> list[Row]:
    """All rows, by concurrency, temperature, category (and overall) and method, of whole rounds."""
    figures: list[Row] = []
    by_setting: dict[tuple[int, float], list[JobResult]] = {}
    for result in record:
        by_setting.setdefault((result.job.concurrency, result.job.temperature), []).append(result)
    for results in by_setting.values():
        categories = dict.fromkeys(result.job.category for result in results)
        parts = {name: [r for r in results if r.job.category == name] for name in categories}
        if len(parts) != 1:
            parts[OVERALL] = results
        for category, part in parts.items():
            numbers = dict.fromkeys(result.round_index for result in part)
            rounds = [[result for result in part if result.round_index == n] for n in numbers]
            full = max(map(len, rounds))
            rounds = [results for results in rounds if len(results) == full]
            figures += [_row(category, rounds, name) for name in rounds[0][0].runs]
    return figures


def _row(category: str, rounds: list[list[JobResult]], name: str) -> Row:
    job = rounds[0][0].job
    runs, plain_runs = (
        [[result.runs[method] for result in results] for results in rounds]
        for method in (name, PLAIN)
    )
    merged_rounds, plain_rounds = list(map(merged, runs)), list(map(merged, plain_runs))
    pairs = zip(merged_rounds, plain_rounds, strict=True)
    whole = merged(merged_rounds)
    gaps = [gap for answer in whole.answers for gap in answer.gaps]
    token_gaps = [gap / count for gap, count in gaps for _ in range(count)]
    sampled = name != PLAIN and job.concurrency == 1 and len(rounds[0]) >= _MIN_PROMPTS
    mean_rates = (
        [statistics.mean(run.rate for run in one_round) for one_round in by_round]
        for by_round in (runs, plain_runs)
    )
    return Row(
        method=name,
        category=category,
        concurrency=job.concurrency,
        temperature=job.temperature,
        rounds=len(rounds),
        jobs_per_round=len(rounds[0]),
        requests=len(whole.answers),
        tokens=whole.tokens,
        tokens_per_second=Spread.of([run.rate for run in merged_rounds]),
        speedup=Spread.of([run.rate / plain.rate for run, plain in pairs]),
        interval=_confidence_interval(runs, plain_runs) if sampled else None,
        mean_speedup=statistics.median(map(truediv, *mean_rates)),
        time_to_first_token=statistics.median(a.arrivals[0][0] for a in whole.answers),
        inter_token_p50=percentile(token_gaps, 0.50),
        inter_token_p99=percentile(token_gaps, 0.99),
        stall_p99=percentile([gap for gap, _ in gaps], 0.99),
        drafts=draft_figures(whole),
    )


def draft_figures(run: TimedRun) -> dict[str, Any]:
    """Draft lengths and acceptance. ``reached[i]``: drafts that had a token at position i and whose
    earlier tokens were all accepted; ``acceptance[i]``: the share of them whose token i was
    accepted. ``length``: mean drafted tokens per step.
    ``mean_accepted_length``: tokens per target step, the bonus token included;
    ``mean_accepted_tokens``: the same without the steps with prefill, as Spec-Bench counts."""
    counts, steps = run.counts, run.counts.target_steps
    first, later_steps = sum(a.arrivals[0][1] for a in run.answers), steps - len(run.answers)
    return {
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "mean_accepted_length": run.tokens_per_step,
        "mean_accepted_tokens": (run.tokens - first) / later_steps if later_steps else None,
        "acceptance_rate": counts.acceptance_rate,
        "length": counts.drafted / steps if steps else None,
        "acceptance": tuple(counts.rates),
        "reached": tuple(counts.reached_at),
        "not_drafted": dict(counts.not_drafted),
    }


def _confidence_interval(
    *by_round: Sequence[Sequence[TimedRun]],
) -> tuple[float, float]:
    """95 % confidence interval of the speedup in tokens per second (the median over rounds), by
    bootstrap over prompts, from the runs of a method and those of plain decoding."""
    # [rounds, prompts, 2] each: tokens and seconds.
    sums = [np.array([[(r.tokens, r.seconds) for r in runs] for runs in m]) for m in by_round]
    table = np.concatenate(sums, axis=2)
    prompts = table.shape[1]
    resampled = np.random.default_rng(0).integers(prompts, size=(_RESAMPLES, prompts))
    tokens, seconds, plain_tokens, plain_seconds = np.moveaxis(table[:, resampled].sum(2), -1, 0)
    ratios = np.median(tokens / seconds * plain_seconds / plain_tokens, axis=0)
    low, high = np.quantile(ratios, _QUANTILES)
    return float(low), float(high)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` of the values do not exceed (nearest rank), if any."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def idle(record: list[JobResult], speculative: Collection[str]) -> dict[str, str]:
    """The speculative methods without any accepted draft in the whole run, and the reason."""
    reasons: dict[str, str] = {}
    for name in speculative:
        whole = merged([result.runs[name] for result in record if name in result.runs])
        if whole.answers and not whole.counts.accepted:
            drafted = whole.counts.drafted
            reasons[name] = "had none of its drafts accepted" if drafted else "drafted nothing"
    return reasons


@dataclass(frozen=True)
class SameTexts:
    """How many texts of a method are plain decoding's, and where the first other one is."""

    identical: int = 0
    different: int = 0
    first: str = ""

    @property
    def shown(self) -> str:
        return f"{self.identical} of {self.identical + self.different}"


def compare(record: list[JobResult]) -> dict[str, SameTexts]:
    """Compare every distinct pair of texts of the requests that have only one right text: greedy
    ones, and those with a seed, which all methods sample with the same noise."""
    by_method: dict[str, SameTexts] = {}
    seen: set[tuple[object, ...]] = set()
    for result in record:
        job, plain = result.job, result.runs[PLAIN]
        for name, run in result.runs.items():
            for number, request in enumerate(job.requests):
                params = request.params
                left, right = plain.answers[number].tokens, run.answers[number].tokens
                key = (name, request.prompt, params.temperature, params.seed, left, right)
                determined = params.greedy or params.seed is not None
                if name == PLAIN or not determined or key in seen:
                    continue
                seen.add(key)
                texts = by_method.get(name, SameTexts())
                if left == right:
                    by_method[name] = replace(texts, identical=texts.identical + 1)
                    continue
                where = f"{job.category}, request {job.index + number}"
                first = texts.first or f"{where}, token {first_difference(left, right)}"
                by_method[name] = replace(texts, different=texts.different + 1, first=first)
    return by_method


@dataclass(frozen=True)
class BenchResult:
    """The whole result. ``idle``: methods without accepted drafts, and the reason. ``left_out``:
    prompts too long for the model."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    methods: Sequence[Method]
    rows: Sequence[Row]
    texts: Mapping[str, SameTexts]
    idle: dict[str, str]
    left_out: Sequence[str] = ()
    interrupted: bool = False
    spending: Spending | None = None

    @classmethod
    def of(
        cls, methods: Sequence[Method], settings: dict[str, Any], llm: LLM, record: list[JobResult]
    ) -> BenchResult:
        return cls(
            model=settings["model"],
            machine=machine_of(llm),
            settings=settings,
            methods=methods,
            rows=rows(record),
            texts=compare(record),
            idle=idle(record, [method.name for method in methods if method.draft]),
        )

    def record(self) -> dict[str, Any]:
        """The JSON object: medians and spreads, unrounded, in seconds."""
        names = ("model", "interrupted", "machine", "settings", "idle")
        return {
            **{name: getattr(self, name) for name in names},
            "methods": [asdict(method) for method in self.methods],
            "figures": [asdict(row) for row in self.rows],
            "texts": {name: asdict(texts) for name, texts in self.texts.items()},
            "bugs": self.bugs(),
            "prompts_left_out": list(self.left_out),
            "budget": self.spending and asdict(self.spending),
        }

    def bugs(self) -> list[str]:
        """Methods whose text differs from plain decoding's, on the native kernels. On torch it may
        be a near tie."""
        native = self.machine["backend"] == NATIVE
        return [name for name, texts in self.texts.items() if texts.different and native]

    def failures(self) -> list[str]:
        """One line for each reason for which the command fails."""
        return [
            f"the text of {name} differs from {PLAIN} decoding's ({self.texts[name].first}); this "
            "is a bug, please report it"
            for name in self.bugs()
        ]

    def warnings(self) -> list[str]:
        """What the reader must not miss, in sentences."""
        lines = [f"{line}." for line in self.failures()]
        lines += [
            f"{name} {reason} in the whole run, so its figures are those of plain decoding; "
            "try other prompts, another draft or a fixed length (@4)."
            for name, reason in self.idle.items()
        ]
        if not self.bugs() and any(texts.different for texts in self.texts.values()):
            lines.append("Texts that differ may be near ties; paceline certify tells.")
        if self.interrupted:
            lines.append("Interrupted: the figures are those of the completed runs.")
        return lines


def machine_of(llm: LLM) -> dict[str, Any]:
    """The machine on which the figures were measured, its software, and its load before."""
    device, cuda = llm.target.device, llm.target.device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device": device.type,
        "threads": 0 if cuda else torch.get_num_threads(),
        "cores": os.cpu_count(),
        "dtype": llm.target.dtype_text,
        "backend": llm.target.backend.name,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "paceline": version("paceline"),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
