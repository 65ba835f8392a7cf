"""What a profile says: once, as columns, for the screen, reports and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.lab.profiling.limits import rate
from paceline.lab.profiling.runs import ProfileResult, RunProfile
from paceline.lab.report.document import (
    Column,
    Figure,
    Report,
    Table,
    Text,
    record_of,
    share,
    size,
    table_across,
    table_of,
)
from paceline.lab.report.plots import bars


def _thousandths(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda c: -c[1]))


# Of a phase: two tables, of which the second has the rest of the record.
_NAME = Column("", "phase", "name")
_TIMES = (
    Column("seconds", "ms", shown=_thousandths),
    Column("share", "share", shown=share),
    Column("kernels", "kernels ms", shown=_thousandths),
    Column("launches", "calls ms", shown=_thousandths),
    Column("python", "Python ms", shown=_thousandths),
    Column("calls", "ops", "work.ops", "{:.0f}".format),
)
_LIMITS = (
    Column("bytes", "moves", "work.bytes", size),
    Column("weight_bits", "bits a weight", "work.weight_bits", "{:.3g}".format),
    Column("bytes_per_second", "GB/s", shown=_giga),
    Column("of_read_bandwidth", "of read", shown=share),
    Column("flops_per_second", "GFLOP/s", shown=_giga),
    Column("of_peak_flops", "of peak", shown=share),
    Column("", "limit", "label"),
    *map(Column, ("bound", "saturated", "bandwidth")),
    Column("kernel_calls", path="work.kernels"),
    *(Column(key, path=f"work.{key}") for key in ("flops", "parameters", "passes", "rows")),
)
_MACHINE = (
    *map(Column, ("device", "dtype", "threads")),
    Column("read_bandwidth", "read bandwidth", shown=rate),
    Column("peak_flops", "products, GFLOP/s", shown=_giga),
    Column("product_seconds", "smallest product, µs", shown=lambda s: f"{1e6 * s:.2f}"),
)
_RUN = (
    Column("step_seconds", "step, ms", shown=_thousandths),
    Column("tokens_per_step", "tokens a step", shown="{:.2f}".format),
    Column("tokens_per_second", "tokens/s", shown="{:.0f}".format),
    Column("drafters", "accepted tokens of", shown=_counts, stored=dict),
    Column("not_drafted", "steps without a draft", shown=_counts, stored=dict),
    *map(Column, ("name", "context", "working_set_bytes")),
    Column("drafted_tokens", path="sums.drafted"),
    Column("accepted_tokens", path="sums.accepted"),
    *map(Column, ("processor_busy_elsewhere", "profiler_slowdown", "profiled_steps")),
    Column("phases", stored=lambda ps: {p.name: record_of(p, _TIMES + _LIMITS) for p in ps}),
    *map(Column, ("warnings", "verdict")),
)


def record(result: ProfileResult) -> dict[str, Any]:
    """Plain data for JSON."""
    machine = None if result.machine is None else record_of(result.machine, _MACHINE)
    return {"machine": machine, "runs": [record_of(run, _RUN) for run in result.runs]}


def report_of(result: ProfileResult, setting: str) -> Report:
    """``setting`` says in a line what was decoded. Runs that were not finished are not in it."""
    report, machine = Report("Profile of steady decoding"), result.machine
    if machine is None:
        return report
    runs = {run.name: run for run in result.runs}
    if runs:
        phases = {
            of_runs[0].name: [1e3 * phase.seconds for phase in of_runs]
            for of_runs in zip(*(run.phases for run in result.runs), strict=True)
        }
        note = f"{setting} Medians of rounds in turn, without the profiler."
        title = "Time of a step by phase"
        picture = Figure(
            title, lambda: bars(list(runs), phases, "ms a step", stacked=True), "phases"
        )
        report.add("Steps", table_across("", runs, _RUN[:5], note), picture)
    for name, run in runs.items():
        report.add(f"Limits: {name}", *_limits(run))
    note = (
        f"{machine.device}, {machine.dtype}, threads: {machine.threads}. Read over a buffer that "
        "no cache holds, products with a weight that stays in the cache."
    )
    speeds = [column for column in _MACHINE if column.heading]
    report.add("Machine", table_across("measured", {"at best": machine}, speeds, note))
    for name, run in runs.items():
        warnings = [Text(words, warning=True) for words in run.warnings]
        report.add(f"Verdict: {name}", *warnings, *map(Text, run.verdict))
    return report


def _limits(run: RunProfile) -> list[Table]:
    times = (
        "kernels: products and attention (on CUDA whatever the device runs). calls: what calling "
        "those costs, and all other operators. Python: between operators. Shares from "
        f"{run.profiled_steps} steps under the profiler ({run.profiler_slowdown:.2f}x as long)."
    )
    moves = (
        "moves: weights each time they are read, keys and values in the cache, other tensors from "
        f"256 KiB. of read: of {rate(run.phases[0].bandwidth)}, measured over "
        f"{size(run.working_set_bytes)}, what a step reads."
    )
    return [
        table_of(run.phases, (_NAME, *_TIMES), times, "Whose time it is, a step"),
        table_of(run.phases, (_NAME, *_LIMITS), moves, "What it does, by what the machine can"),
    ]
