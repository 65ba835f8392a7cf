"""The report of a profile: plain and speculative side by side, limits, operators, verdicts."""

from __future__ import annotations

from paceline.tools.profiling.machine import MachineSpeeds
from paceline.tools.profiling.runs import ProfileResult, RunProfile
from paceline.tools.profiling.verdict import label, rate, rows_of, size
from paceline.tools.report.document import Cell, Figure, Report, Table, Text
from paceline.tools.report.plots import stacks

_TOP = 8  # operators in the table


def report_of(result: ProfileResult, setting: str) -> Report:
    """``setting`` says in a line what was decoded. Runs that were not finished are not in it."""
    report = Report("Profile of steady decoding")
    machine = result.machine
    if machine is None:
        return report
    if result.runs:
        report.add("Steps", _side_by_side(result.runs, setting), _phase_figure(result.runs))
    for run in result.runs:
        report.add(f"Limits: {run.name}", _time_table(run), _limit_table(run, machine))
        report.sections[-1].blocks.append(_part_figure(run))
    report.add("Machine", _machine_table(machine))
    for run in result.runs:
        report.add(f"Operators: {run.name}", _operator_table(run))
    for run in result.runs:
        warnings = [Text(words, warning=True) for words in run.warnings()]
        report.add(f"Verdict: {run.name}", *warnings, *map(Text, run.sentences(machine)))
    return report


def _side_by_side(runs: list[RunProfile], setting: str) -> Table:
    rows: list[list[Cell]] = []
    for place, figures in enumerate(runs[0].figures):
        cells: list[Cell] = [f"{figures.name}, ms a step"]
        rows.append(cells + [f"{1e3 * run.figures[place].seconds:.3f}" for run in runs])
    rows.append(["step, ms", *(f"{1e3 * run.step_seconds:.3f}" for run in runs)])
    rows.append(["tokens a step", *(f"{run.tokens_per_step:.2f}" for run in runs)])
    rows.append(["tokens/s", *(f"{run.tokens_per_second:.0f}" for run in runs)])
    return Table(
        ["", *(run.name for run in runs)],
        rows,
        note=f"{setting} Medians of rounds in turn, without the profiler.",
    )


def _time_table(run: RunProfile) -> Table:
    rows: list[list[Cell]] = [
        [
            f.name,
            f"{1e3 * f.seconds:.3f}",
            f"{f.seconds / run.step_seconds:.0%}",
            f"{1e3 * f.kernels:.3f}",
            f"{1e3 * f.launches:.3f}",
            f"{1e3 * f.python:.3f}",
            f"{f.calls:.0f}",
        ]
        for f in run.figures
    ]
    return Table(
        ["phase", "ms", "share", "kernels ms", "calls ms", "Python ms", "ops"],
        rows,
        title="Whose time it is, a step",
        note="kernels: products and attention (on CUDA whatever the device runs). calls: what "
        "calling those costs, and all other operators. Python: between operators. Shares from "
        f"{run.profiled_steps} steps under the profiler, which took {run.slowdown:.2f}x as long; "
        "times without it.",
    )


def _limit_table(run: RunProfile, machine: MachineSpeeds) -> Table:
    rows: list[list[Cell]] = [
        [
            f.name,
            size(f.bytes),
            f"{f.bytes_per_second / 1e9:.2f}",
            f"{f.bytes_per_second / machine.copy_bandwidth:.0%}",
            f"{f.of_bandwidth():.0%}",
            f"{f.flops_per_second / 1e9:.2f}",
            f"{f.of_compute(machine):.0%}",
            label(f, machine),
        ]
        for f in run.figures
    ]
    working_set = size(run.working_set)
    return Table(
        ["phase", "moves", "GB/s", "of copy", "of read", "GFLOP/s", "of peak", "bound by"],
        rows,
        title="What it does, by what the machine can",
        note="moves: weights each time they are read, keys and values in the cache, other tensors "
        f"from 256 KiB. of read: of {rate(run.figures[0].bandwidth)}, measured over {working_set}, "
        "what a step reads.",
    )


def _machine_table(machine: MachineSpeeds) -> Table:
    products: list[list[Cell]] = [
        [f"products of {rows_of(count)}, {machine.dtype}", f"{flops / 1e9:.3g} GFLOP/s"]
        for count, flops in machine.products
    ]
    cache = "unknown" if machine.cache_bytes is None else f"{machine.cache_bytes / 2**20:.0f} MiB"
    rows: list[list[Cell]] = [
        ["copy bandwidth, bytes read and written", rate(machine.copy_bandwidth)],
        ["read bandwidth", rate(machine.read_bandwidth)],
        ["last-level cache", cache],
        *products,
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
    total = sum(operator.seconds for operator in run.operators)
    steps = run.profiled_steps
    rows: list[list[Cell]] = [
        [
            o.name,
            f"{o.calls / steps:.0f}",
            f"{1e6 * o.seconds / o.calls:.1f}",
            f"{1e3 * o.seconds / steps:.3f}",
            f"{o.seconds / total:.0%}" if total else "",
        ]
        for o in run.operators[:_TOP]
    ]
    return Table(
        ["operator", "calls", "µs each", "ms", "share"],
        rows,
        note="Of a step under the profiler: own time, without what an operator calls in turn.",
    )


def _phase_figure(runs: list[RunProfile]) -> Figure:
    names = [figures.name for figures in runs[0].figures]
    parts = {
        name: [1e3 * run.figures[place].seconds for run in runs] for place, name in enumerate(names)
    }
    return Figure(
        "Time of a step by phase",
        lambda: stacks([run.name for run in runs], parts, "ms a step"),
        "phases",
    )


def _part_figure(run: RunProfile) -> Figure:
    parts = {
        "products and attention": [1e3 * f.kernels for f in run.figures],
        "calls and small operators": [1e3 * f.launches for f in run.figures],
        "Python": [1e3 * f.python for f in run.figures],
    }
    return Figure(
        f"Whose time it is: {run.name}",
        lambda: stacks([f.name for f in run.figures], parts, "ms a step"),
        "parts-" + "".join(c if c.isalnum() else "-" for c in run.name),
    )
