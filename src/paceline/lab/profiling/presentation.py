"""The report of a profile: plain and speculative side by side, limits, operators, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from paceline.lab.profiling.machine import MachineSpeeds
from paceline.lab.profiling.runs import ProfileResult, RunProfile
from paceline.lab.profiling.verdict import Figures, label, rate, rows_of, size
from paceline.lab.report.columns import Column, table_across, table_of
from paceline.lab.report.document import Cell, Figure, Report, Table, Text
from paceline.lab.report.plots import stacks

_TOP = 8  # operators in the table


def _thousandths(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _seconds(index: int, figures: Sequence[Figures]) -> str:
    return _thousandths(figures[index].seconds)


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda c: -c[1]))


_share = "{:.0%}".format
# Of a phase as the run's record has it.
_TIMES = (
    Column("", "phase", "name"),
    Column("", "ms", "seconds", _thousandths),
    Column("", "share", "share", _share),
    Column("", "kernels ms", "kernels", _thousandths),
    Column("", "calls ms", "launches", _thousandths),
    Column("", "Python ms", "python", _thousandths),
    Column("", "ops", "calls", "{:.0f}".format),
)
_LIMITS = (
    Column("", "phase", "name"),
    Column("", "moves", "bytes", size),
    Column("", "bits a weight", "weight_bits", lambda bits: f"{bits:.3g}" if bits else ""),
    Column("", "GB/s", "bytes_per_second", _giga),
    Column("", "of copy", "of_copy_bandwidth", _share),
    Column("", "of read", "of_read_bandwidth", _share),
    Column("", "GFLOP/s", "flops_per_second", _giga),
    Column("", "of peak", "of_peak_flops", _share),
    Column("", "bound by", "label"),
)
_SIDE_BY_SIDE = (
    Column("", "step, ms", "step_seconds", _thousandths),
    Column("", "tokens a step", "tokens_per_step", "{:.2f}".format),
    Column("", "tokens/s", "tokens_per_second", "{:.0f}".format),
    Column("", "accepted tokens of", "drafters", _counted),
    Column("", "steps without a draft", "not_drafted", _counted),
)


def report_of(result: ProfileResult, setting: str) -> Report:
    """``setting`` says in a line what was decoded. Runs that were not finished are not in it."""
    report = Report("Profile of steady decoding")
    machine = result.machine
    if machine is None:
        return report
    if result.runs:
        names = [run.name for run in result.runs]
        phases = {
            figures.name: [1e3 * run.figures[number].seconds for run in result.runs]
            for number, figures in enumerate(result.runs[0].figures)
        }
        picture = _picture("Time of a step by phase", "phases", names, phases)
        report.add("Steps", _side_by_side(result.runs, setting), picture)
    for run in result.runs:
        report.add(f"Limits: {run.name}", *_limits(run, machine))
    report.add("Machine", _machine_table(machine))
    for run in result.runs:
        report.add(f"Operators: {run.name}", _operator_table(run))
    for run in result.runs:
        warnings = [Text(words, warning=True) for words in run.warnings()]
        report.add(f"Verdict: {run.name}", *warnings, *map(Text, run.sentences(machine)))
    return report


def _picture(title: str, name: str, bars: list[str], parts: dict[str, list[float]]) -> Figure:
    return Figure(title, lambda: stacks(bars, parts, "ms a step"), name)


def _side_by_side(runs: list[RunProfile], setting: str) -> Table:
    phases = [
        Column("", f"{f.name}, ms a step", "figures", partial(_seconds, n))
        for n, f in enumerate(runs[0].figures)
    ]
    note = f"{setting} Medians of rounds in turn, without the profiler."
    return table_across("", {run.name: run for run in runs}, [*phases, *_SIDE_BY_SIDE], note)


def _limits(run: RunProfile, machine: MachineSpeeds) -> list[Table | Figure]:
    record = run.record(machine)["phases"]
    phases = [{**record[f.name], "name": f.name, "label": label(f, machine)} for f in run.figures]
    times = (
        "kernels: products and attention (on CUDA whatever the device runs). calls: what calling "
        "those costs, and all other operators. Python: between operators. Shares from "
        f"{run.profiled_steps} steps under the profiler, which took {run.slowdown:.2f}x as long; "
        "times without it."
    )
    moves = (
        "moves: weights each time they are read, keys and values in the cache, other tensors from "
        f"256 KiB. of read: of {rate(run.figures[0].bandwidth)}, measured over "
        f"{size(run.working_set)}, what a step reads."
    )
    parts = {
        "products and attention": [1e3 * f.kernels for f in run.figures],
        "calls and small operators": [1e3 * f.launches for f in run.figures],
        "Python": [1e3 * f.python for f in run.figures],
    }
    name = "parts-" + "".join(c if c.isalnum() else "-" for c in run.name)
    bars = [figures.name for figures in run.figures]
    return [
        table_of(phases, _TIMES, times, "Whose time it is, a step"),
        table_of(phases, _LIMITS, moves, "What it does, by what the machine can"),
        _picture(f"Whose time it is: {run.name}", name, bars, parts),
    ]


def _machine_table(machine: MachineSpeeds) -> Table:
    cache = "unknown" if machine.cache_bytes is None else f"{machine.cache_bytes / 2**20:.0f} MiB"
    rows: list[Sequence[Cell]] = [
        ["copy bandwidth, bytes read and written", rate(machine.copy_bandwidth)],
        ["read bandwidth", rate(machine.read_bandwidth)],
        ["last-level cache", cache],
        *(
            [f"products of {rows_of(count)}, {machine.dtype}", f"{flops / 1e9:.3g} GFLOP/s"]
            for count, flops in machine.products
        ),
        ["call of the smallest product", f"{1e6 * machine.product_seconds:.2f} µs"],
        ["call of an operator that does next to nothing", f"{1e6 * machine.op_seconds:.2f} µs"],
    ]
    threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
    return Table(
        ["measured", "at best"],
        rows,
        note=f"{machine.device}, {threads}; bandwidths over {machine.buffer_bytes / 2**20:.0f} MiB,"
        " products with a weight that stays in the cache.",
    )


def _operator_table(run: RunProfile) -> Table:
    total, steps = sum(operator.seconds for operator in run.operators), run.profiled_steps
    columns = (
        Column("", "operator", "name"),
        Column("", "calls", "calls", lambda calls: f"{calls / steps:.0f}"),
        Column("", "µs each", "", lambda o: f"{1e6 * o.seconds / o.calls:.1f}"),
        Column("", "ms", "seconds", lambda seconds: f"{1e3 * seconds / steps:.3f}"),
        Column("", "share", "seconds", lambda seconds: f"{seconds / total:.0%}" if total else ""),
    )
    note = (
        "Of a step under the profiler, the median of those that called it: own time, without what "
        "an operator calls in turn."
    )
    return table_of(run.operators[:_TOP], columns, note)
