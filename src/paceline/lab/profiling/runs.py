"""Profiles of plain and speculative decoding on the same prompts, and their tables and JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.engine.driver import StepTotals
from paceline.kernels.library import active_threads
from paceline.lab.profiling import limits, steady
from paceline.lab.report.document import (
    NOTES,
    Column,
    Report,
    Text,
    record_of,
    share,
    size,
    table_across,
    table_of,
)
from paceline.llm import LLM
from paceline.model.backends.base import NATIVE

PROFILED_STEPS = 20  # give the shares to a per cent
BUSY = 0.1  # of a step's time without a processor, above which no figure repeats
MINOR = 0.05  # of a step: a shorter phase is not worth a sentence
_NOTES = NOTES["profile"]
PLAIN = "plain"  # the name of decoding without a drafter


@dataclass(frozen=True)
class RunProfile(steady.Stretch):
    """The profile of one way of decoding, over all timed rounds. ``working_set_bytes``: distinct
    bytes that a step reads. ``profiler_slowdown``: step time under the profiler by that without.
    ``active_threads``: threads of the last forward."""

    name: str
    phases: tuple[limits.Phase, ...]
    working_set_bytes: float
    profiler_slowdown: float
    profiled_steps: int
    active_threads: int

    @property
    def tokens_per_step(self) -> float:
        return self.sums.tokens / self.sums.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def context(self) -> float:
        """Cached tokens of an average sequence, halfway."""
        return self.sums.context / self.sums.sequences

    @property
    def step_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def warnings(self) -> list[str]:
        """Why the figures may not be what they seem."""
        notes = []
        if self.busy > BUSY:
            notes.append(
                "the machine is busy: other programs had the processor for "
                f"{self.busy:.0%} of the time; times are too long and limits "
                "seem further away than they are; measure again on an idle machine"
            )
        if self.name != PLAIN and not self.sums.drafted:
            notes.append(
                f"{self.name}: nothing was drafted, so these are the figures of plain decoding; "
                "give --draft-length a number to see drafting"
            )
        return notes

    @property
    def verdict(self) -> list[str]:
        """What bounds the step, then the same for each phase that matters, the longest first."""
        longest = sorted(self.phases, key=lambda phase: -phase.seconds)
        labels = {phase.label for phase in longest}
        share, first = max((sum(p.share for p in longest if p.label == x), x) for x in labels)
        whole = (
            f"{self.name}: a step takes {1e3 * self.step_seconds:.3g} ms "
            f"({self.tokens_per_second:.0f} tokens/s); {share:.0%} of it is {first}."
        )
        return [whole, *(phase.explain() for phase in longest if phase.share >= MINOR)]


@dataclass
class ProfileResult:
    """What is known until now: runs are added when they are complete."""

    machine: limits.MachineSpeeds | None = None
    runs: list[RunProfile] = field(default_factory=list)


def stages(engines: int, rounds: int) -> int:
    """Calls of ``advance`` that ``profile_all`` makes."""
    return engines * (rounds + 2) + 1


def profile_all(
    engines: Sequence[tuple[str, LLM]],
    prompts: Sequence[list[int]],
    steps: int,
    rounds: int,
    trace_file: str | Path | None,
    result: ProfileResult,
    advance: Callable[[str], object],
) -> None:
    """Fill ``result``: count the work, measure the machine, time ``steps`` steady steps a round in
    turn, then profile; the last engine's trace goes to ``trace_file``. ``advance(what)`` is called
    before each piece. Raises ConfigError if there is no room for a steady state."""
    counters = [limits.WorkCounter() for _ in engines]
    for (name, llm), counter in zip(engines, counters, strict=True):
        advance(f"{name}: counting")
        steady.run(llm, prompts, steps, counter.phase)
    advance("measuring the machine")
    target = engines[0][1].target
    result.machine = limits.measure_machine(target.device, target.dtype)
    timed: list[list[steady.Stretch]] = [[] for _ in engines]
    for number in range(rounds):
        for (name, llm), stretches in zip(engines, timed, strict=True):
            advance(f"{name}: round {number + 1}")
            stretches.append(steady.run(llm, prompts, steps))
    for (name, llm), stretches, counter in zip(engines, timed, counters, strict=True):
        advance(f"{name}: profiling")
        file = trace_file if llm is engines[-1][1] else None
        slow, shares = steady.profiled(llm, prompts, min(PROFILED_STEPS, steps), file)
        result.runs.append(_assemble(name, llm, stretches, counter, slow, shares, result.machine))


def _assemble(
    name: str,
    llm: LLM,
    stretches: Sequence[steady.Stretch],
    counter: limits.WorkCounter,
    slow: steady.Stretch,
    shares: dict[str, steady.Share],
    machine: limits.MachineSpeeds,
) -> RunProfile:
    """``slow`` and ``shares``: of the steps under the profiler."""
    works = {phase: work.per_step(counter.steps) for phase, work in counter.phases.items()}
    weights = {key: size for work in works.values() for key, (_, size) in work.weights.items()}
    working_set = sum(weights.values()) + sum(work.cache_bytes for work in works.values())
    bandwidth = limits.read_bandwidth(llm.target.device, max(1, int(working_set)))
    seconds = {
        phase: statistics.median(stretch.sums.mean_seconds(phase) for stretch in stretches)
        for phase in slow.sums.seconds
    }
    step = sum(seconds.values())
    phases = []
    for phase, taken in seconds.items():
        share = shares.get(phase, steady.Share())
        parts = share.split(taken, machine.product_seconds, slow.sums.steps)
        work, peaks = works.get(phase, limits.Work()), (bandwidth, machine.peak_flops)
        phases.append(limits.Phase(phase, taken, *parts, work, taken / step, *peaks))
    busy = statistics.median(stretch.busy for stretch in stretches)
    native = llm.target.backend.name == NATIVE
    threads = active_threads() if native else torch.get_num_threads()
    return RunProfile(
        name=name,
        phases=tuple(phases),
        sums=sum((stretch.sums for stretch in stretches), StepTotals()),
        working_set_bytes=working_set,
        drafters=sum((stretch.drafters for stretch in stretches), Counter()),
        not_drafted=sum((stretch.not_drafted for stretch in stretches), Counter()),
        busy=max(slow.busy, busy),
        profiler_slowdown=slow.sums.whole / slow.sums.steps / step,
        profiled_steps=slow.sums.steps,
        active_threads=threads,
    )


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
    *(Column(key, path=f"work.{key}") for key in ("flops", "parameters")),
)
_MACHINE = (
    *map(Column, ("device", "dtype", "threads")),
    Column("read_bandwidth", "read bandwidth", shown=limits.rate),
    Column("peak_flops", "products, GFLOP/s", shown=_giga),
    Column("product_seconds", "smallest product, µs", shown=lambda s: f"{1e6 * s:.2f}"),
)
_RUN = (
    Column("step_seconds", "step, ms", shown=_thousandths),
    Column("tokens_per_step", "tokens a step", shown="{:.2f}".format),
    Column("tokens_per_second", "tokens/s", shown="{:.0f}".format),
    Column("active_threads", "threads of a forward"),
    Column("drafters", "accepted tokens of", shown=_counts, stored=dict),
    Column("not_drafted", "steps without a draft", shown=_counts, stored=dict),
    *map(Column, ("name", "context", "working_set_bytes")),
    Column("drafted_tokens", path="sums.drafted"),
    Column("accepted_tokens", path="sums.accepted"),
    Column("processor_busy_elsewhere", path="busy"),
    *map(Column, ("profiler_slowdown", "profiled_steps")),
    Column("phases", stored=lambda ps: {p.name: record_of(p, _TIMES + _LIMITS) for p in ps}),
    *map(Column, ("warnings", "verdict")),
)


def record(result: ProfileResult) -> dict[str, Any]:
    machine = None if result.machine is None else record_of(result.machine, _MACHINE)
    return {"machine": machine, "runs": [record_of(run, _RUN) for run in result.runs]}


def report_of(result: ProfileResult, setting: str) -> Report:
    """``setting`` says in a line what was decoded. Runs that were not finished are not in it."""
    report, machine = Report("Profile of steady decoding"), result.machine
    if machine is None:
        return report
    runs = {run.name: run for run in result.runs}
    if runs:
        note = f"{setting} Medians of rounds in turn, without the profiler."
        report.add("Steps", table_across("", runs, _RUN[:6], note))
    for name, run in runs.items():
        read = limits.rate(run.phases[0].bandwidth), size(run.working_set_bytes)
        times, moves = _NOTES["times"].format(run), _NOTES["moves"].format(*read)
        report.add(
            f"Limits: {name}",
            table_of(run.phases, (_NAME, *_TIMES), times, "Whose time it is, a step"),
            table_of(run.phases, (_NAME, *_LIMITS), moves, "What it does, by what the machine can"),
        )
    note = _NOTES["machine"].format(machine)
    speeds = [column for column in _MACHINE if column.heading]
    report.add("Machine", table_across("measured", {"at best": machine}, speeds, note))
    for name, run in runs.items():
        warnings = [Text(words, warning=True) for words in run.warnings]
        report.add(f"Verdict: {name}", *warnings, *map(Text, run.verdict))
    return report
