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

TRACED_STEPS = 20
PLAIN = "plain"  # the name of decoding without a drafter
_NOTES = NOTES["profile"]


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase in a step, and their share of the step."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class RunProfile(steady.Stretch):
    """The profile of one way of decoding, over all timed rounds. ``active_threads``: threads of the
    last forward."""

    name: str
    phases: tuple[Phase, ...]
    forward: limits.Forward
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
    def verdict(self) -> str:
        """What a step takes, the phase that takes most of it, and what limits the forward."""
        longest = max(self.phases, key=lambda phase: phase.seconds)
        text = (
            f"{self.name}: a step takes {1e3 * self.step_seconds:.3g} ms "
            f"({self.tokens_per_second:.0f} tokens/s), {longest.share:.0%} of it in the phase "
            f"{longest.name}."
        )
        if longest.name == "target":
            return f"{text} {self.forward.explain()}"
        return f"{text} What helps: {_NOTES['helps'][longest.name]}."


@dataclass
class ProfileResult:
    """What is known until now: runs are added when they are complete."""

    machine: limits.MachineSpeeds | None = None
    runs: list[RunProfile] = field(default_factory=list)


def stages(engines: int, rounds: int, traced: bool) -> int:
    """Calls of ``advance`` that ``profile_all`` makes."""
    return engines * (rounds + 1) + 1 + traced


def profile_all(
    engines: Sequence[tuple[str, LLM]],
    prompts: Sequence[list[int]],
    steps: int,
    rounds: int,
    trace_file: str | Path | None,
    result: ProfileResult,
    advance: Callable[[str], object],
) -> None:
    """Fill ``result``: warm up, measure the machine, time ``steps`` steady steps a round in turn;
    then the last engine's trace goes to ``trace_file``. ``advance(what)`` is called before each
    piece. Raises ConfigError if there is no room for a steady state."""
    first: list[steady.Stretch] = []
    for name, llm in engines:
        advance(f"{name}: warming up")
        first.append(steady.run(llm, prompts, steps))
    advance("measuring the machine")
    plain = engines[0][1]
    read, _ = limits.step_work(plain, first[0].sums)
    target = plain.target
    result.machine = limits.measure_machine(target.device, target.dtype, int(read))
    timed: list[list[steady.Stretch]] = [[] for _ in engines]
    try:
        for number in range(rounds):
            for (name, llm), stretches in zip(engines, timed, strict=True):
                advance(f"{name}: round {number + 1}")
                stretches.append(steady.run(llm, prompts, steps))
    finally:  # after an interrupt, of the rounds until then
        for (name, llm), stretches in zip(engines, timed, strict=True):
            if stretches:
                result.runs.append(_assemble(name, llm, stretches, result.machine))
    if trace_file is not None:
        name, llm = engines[-1]
        advance(f"{name}: tracing")
        steady.write_trace(llm, prompts, min(TRACED_STEPS, steps), trace_file)


def _assemble(
    name: str, llm: LLM, stretches: Sequence[steady.Stretch], machine: limits.MachineSpeeds
) -> RunProfile:
    seconds = {
        phase: statistics.median(stretch.sums.mean_seconds(phase) for stretch in stretches)
        for phase in stretches[0].sums.seconds
    }
    step = sum(seconds.values())
    sums = sum((stretch.sums for stretch in stretches), StepTotals())
    native = llm.target.backend.name == NATIVE
    return RunProfile(
        name=name,
        phases=tuple(Phase(phase, taken, taken / step) for phase, taken in seconds.items()),
        sums=sums,
        forward=limits.Forward(seconds["target"], *limits.step_work(llm, sums), machine),
        drafters=sum((stretch.drafters for stretch in stretches), Counter()),
        not_drafted=sum((stretch.not_drafted for stretch in stretches), Counter()),
        active_threads=active_threads() if native else torch.get_num_threads(),
    )


def _thousandths(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda c: -c[1]))


_PHASES = (
    Column("", "phase", "name"),
    Column("seconds", "ms", shown=_thousandths),
    Column("share", "share", shown=share),
)
_FORWARD = (
    Column("bytes", "reads", shown=size),
    Column("bytes_per_second", "GB/s", shown=_giga),
    Column("of_read_bandwidth", "of read bandwidth", shown=share),
    Column("flops"),
    Column("flops_per_second", "GFLOP/s", shown=_giga),
    Column("of_peak_flops", "of peak", shown=share),
    Column("bound", "limit"),
)
_MACHINE = (
    *map(Column, ("device", "dtype", "threads")),
    Column("read_bandwidth", "read bandwidth", shown=limits.rate),
    Column("peak_flops", "products, GFLOP/s", shown=_giga),
)
_RUN = (
    Column("step_seconds", "step, ms", shown=_thousandths),
    Column("tokens_per_step", "tokens a step", shown="{:.2f}".format),
    Column("tokens_per_second", "tokens/s", shown="{:.0f}".format),
    Column("active_threads", "threads of a forward"),
    Column("drafters", "accepted tokens of", shown=_counts, stored=dict),
    Column("not_drafted", "steps without a draft", shown=_counts, stored=dict),
    *map(Column, ("name", "context")),
    Column("drafted_tokens", path="sums.drafted"),
    Column("accepted_tokens", path="sums.accepted"),
    Column("phases", stored=lambda phases: {p.name: record_of(p, _PHASES) for p in phases}),
    Column("forward", stored=lambda forward: record_of(forward, _FORWARD)),
    Column("verdict"),
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
        report.add("Verdict", *(Text(run.verdict) for run in runs.values()))
        note = f"{setting} Medians of rounds in turn."
        report.add("Steps", table_across("", runs, _RUN[:6], note))
        report.add("Phases", *(table_of(run.phases, _PHASES, "", n) for n, run in runs.items()))
        forwards = {name: run.forward for name, run in runs.items()}
        seen = [column for column in _FORWARD if column.heading]
        report.add("The target's forward", table_across("", forwards, seen, _NOTES["forward"]))
    note = _NOTES["machine"].format(machine)
    speeds = [column for column in _MACHINE if column.heading]
    report.add("Machine", table_across("measured", {"at best": machine}, speeds, note))
    return report
