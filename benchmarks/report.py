"""The tables and the JSON object of the decoding benchmark."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from record import Record

PLAIN, FIXED, ADAPTIVE = "paceline plain", "paceline fixed 4", "paceline adaptive"
THEIRS, ASSISTED, LOOKUP = "transformers", "transformers assisted", "transformers lookup"
BATCH = "batch 8"
SAMPLED = "sampled "  # prefix of the suites decoded at temperature 1


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import transformers

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def progress() -> Progress:
    """A bar on stderr, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def figures(record: Record) -> dict[str, Any]:
    """The JSON object of one pair; a figure that was not measured is null."""
    suites = [s for s in record.suites() if s != BATCH and not s.startswith(SAMPLED)]

    def by_suite(fast: str, slow: str) -> dict[str, float | None]:
        return {s: rounded(record.ratio(s, fast, slow)) for s in suites}

    result: dict[str, Any] = {
        "plain_vs_transformers": rounded(mean([record.ratio(s, PLAIN, THEIRS) for s in suites])),
        "speculative_vs_plain": by_suite(FIXED, PLAIN),
        "adaptive_vs_plain": by_suite(ADAPTIVE, PLAIN),
        "speculative_vs_assisted": by_suite(FIXED, ASSISTED),
        "batch8_adaptive_vs_plain": rounded(record.ratio(BATCH, ADAPTIVE, PLAIN)),
        "overhead_fraction": None,
        "tokens_per_second": {
            suite: {n: rounded(record.speed(suite, n), 1) for n in record.contestants(suite)}
            for suite in record.suites()
        },
        "drafts": {},
    }
    for suite in record.suites():
        for name in record.contestants(suite):
            if found := record.drafts(suite, name):
                entry = {key: rounded(value) for key, value in found.items()}
                result["drafts"].setdefault(suite, {})[name] = entry
    rules: dict[str, list[float | None]] = {}
    for suite in record.suites():
        if suite.startswith(SAMPLED):
            for name in record.contestants(suite):
                rules.setdefault(name, []).append(record.speed(suite, name))
    if rules:
        result["sampled_tokens_per_second"] = {n: rounded(mean(v), 1) for n, v in rules.items()}
    return result


def table(record: Record, suites: list[str], title: str) -> Table:
    """Tokens per second by contestant and suite, drafts' figures in brackets."""
    names = list(dict.fromkeys(n for s in suites for n in record.contestants(s)))
    grid = Table(title=title, title_justify="left")
    grid.add_column("tokens/s", no_wrap=True)
    for suite in suites:
        grid.add_column(suite.removeprefix(SAMPLED), justify="right", no_wrap=True)
    for name in names:
        cells = []
        for suite in suites:
            speed, drafts = record.speed(suite, name), record.drafts(suite, name)
            cell = "" if speed is None else f"{speed:.1f}"
            if drafts:
                cell += f" ({drafts['acceptance']:.2f}, {drafts['mean_accepted_length']:.2f})"
            cells.append(cell)
        grid.add_row(name, *cells)
    return grid


def show(pair: str, record: Record, result: dict[str, Any], console: Console) -> None:
    """Print one pair's tables, then its ratios."""
    sampled = [s for s in record.suites() if s.startswith(SAMPLED)]
    greedy = [s for s in record.suites() if s != BATCH and s not in sampled]
    console.print(table(record, greedy, f"{pair}: greedy, batch 1, prefill included"))
    if sampled:
        console.print(table(record, sampled, f"{pair}: temperature 1, batch 1"))
    if BATCH in record.suites():
        console.print(table(record, [BATCH], f"{pair}: greedy, eight prompts together"))
    console.print("in brackets: acceptance rate, tokens per target step", style="dim")
    for key, value in result.items():
        if key not in ("tokens_per_second", "drafts"):
            console.print(f"  {key}: {value}", highlight=False, soft_wrap=True)
