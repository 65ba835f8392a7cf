"""Profiles of plain and speculative decoding on the same prompts, one beside the other."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft.base import NoDrafter
from paceline.engine.clock import PHASES
from paceline.engine.driver import StepSums
from paceline.lab.profiling import steady, trace
from paceline.lab.profiling.machine import (
    MachineSpeeds,
    load_per_processor,
    measure_machine,
    read_bandwidth,
)
from paceline.lab.profiling.verdict import MINOR, Figures, bound, conclude, explain, saturated
from paceline.lab.profiling.work import Work, WorkCounter
from paceline.llm import LLM

# Steps under the profiler: twenty give the shares to a per cent and a trace that opens at once.
PROFILED_STEPS = 20
# Of a step's time, without a processor. Below it medians hold; above it no figure repeats.
BUSY = 0.1
_NO_SHARE = trace.Share()
_BUSY = (
    "times are too long and limits seem further away than they are; measure again on an idle one"
)


@dataclass(frozen=True)
class RunProfile:
    """One way of decoding. ``working_set``: bytes that a step reads, each counted once.
    ``drafts``: whether it has a drafter. ``drafters``: accepted tokens by who drafted them.
    ``not_drafted``: a sequence's steps without a draft, by the controller's reason. ``busy``: share
    of the steps' time that other programs had the processor, with or without the profiler.
    ``load``: of the machine, a processor, before it. ``slowdown``: a step under the profiler by one
    without it."""

    name: str
    figures: tuple[Figures, ...]  # by phase, of a step
    tokens_per_second: float
    tokens_per_step: float
    context: float
    working_set: float
    drafts: bool
    drafted: int
    accepted: int
    drafters: Mapping[str, int]
    not_drafted: Mapping[str, int]
    busy: float
    load: float
    slowdown: float
    profiled_steps: int
    operators: tuple[trace.Operator, ...]

    @property
    def step_seconds(self) -> float:
        return sum(figures.seconds for figures in self.figures)

    def warnings(self) -> list[str]:
        """Why the figures may not be what they seem."""
        notes = []
        busy = ""
        if self.busy > BUSY:
            busy = f"other programs had the processor for {self.busy:.0%} of the time"
        elif self.load > 1:
            busy = f"{self.load:.1f} programs a processor wanted to run before this began"
        if busy:
            notes.append(f"the machine is busy: {busy}; {_BUSY}")
        if self.drafts and not self.drafted:
            notes.append(
                f"{self.name}: nothing was drafted, so these are the figures of plain decoding; "
                "give --draft-length a number to see drafting"
            )
        return notes

    def sentences(self, machine: MachineSpeeds) -> list[str]:
        """What holds the step up, then each phase that matters, the longest first."""
        conclusions = [conclude(self.name, list(self.figures), machine, self.tokens_per_second)]
        if machine.fits_cache(int(self.working_set)):
            conclusions.append(
                "What a step reads fits into the last-level cache, so its bandwidth may exceed "
                "the memory's; a larger model's will not."
            )
        longest = sorted(self.figures, key=lambda figures: -figures.seconds)
        matter = [f for f in longest if f.seconds >= MINOR * self.step_seconds]
        return conclusions + [explain(figures, machine) for figures in matter]

    def record(self, machine: MachineSpeeds) -> dict[str, Any]:
        phases = {
            f.name: {
                **{key: value for key, value in asdict(f).items() if key != "name"},
                "share": f.seconds / self.step_seconds,
                "bytes_per_second": f.bytes_per_second,
                "of_copy_bandwidth": f.bytes_per_second / machine.copy_bandwidth,
                "of_read_bandwidth": f.of_bandwidth(),
                "flops_per_second": f.flops_per_second,
                "of_peak_flops": f.of_compute(machine),
                "bound": bound(f, machine).value,
                "saturated": saturated(f, machine),
            }
            for f in self.figures
        }
        return {
            "name": self.name,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "drafters": dict(self.drafters),
            "not_drafted": dict(self.not_drafted),
            "context": self.context,
            "working_set_bytes": self.working_set,
            "processor_busy_elsewhere": self.busy,
            "load_per_processor": self.load,
            "profiler_slowdown": self.slowdown,
            "profiled_steps": self.profiled_steps,
            "phases": phases,
            "operators": [asdict(operator) for operator in self.operators],
            "warnings": self.warnings(),
            "verdict": self.sentences(machine),
        }


@dataclass
class ProfileResult:
    """What is known until now: runs are added when they are complete."""

    machine: MachineSpeeds | None = None
    runs: list[RunProfile] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        machine = self.machine
        runs = [] if machine is None else [run.record(machine) for run in self.runs]
        return {"machine": machine, "runs": runs}


@dataclass(frozen=True)
class ProfileOptions:
    """How much is measured, and where the last engine's trace goes."""

    steps: int = 40
    rounds: int = 5
    trace: str | Path | None = None


def stages(engines: int, options: ProfileOptions) -> int:
    """Calls of ``advance`` that ``profile_all`` makes."""
    return engines * (options.rounds + 2) + 1


def profile_all(
    engines: Sequence[tuple[str, LLM]],
    prompts: Sequence[list[int]],
    options: ProfileOptions,
    result: ProfileResult,
    advance: Callable[[str], object],
) -> None:
    """Fill ``result``: count the work, measure the machine, time in turn, then profile each.

    ``advance(what)`` is called before each piece of work. Raises ConfigError if the sequences
    have no room for a steady state.
    """
    load = load_per_processor()
    works: list[tuple[dict[str, Work], int]] = []
    for name, llm in engines:
        advance(f"{name}: counting")
        counter = WorkCounter()
        counted = steady.run(llm, prompts, options.steps, counter.phase)
        works.append((counter.phases, counted.sums.steps))
    advance("measuring the machine")
    target = engines[0][1].target
    rows = {max(1, round(w.rows)) for phases, _ in works for w in phases.values()}
    result.machine = measure_machine(target.device, target.dtype, sorted(rows))
    timed: list[list[steady.Stretch]] = [[] for _ in engines]
    for number in range(options.rounds):
        for (name, llm), stretches in zip(engines, timed, strict=True):
            advance(f"{name}: round {number + 1}")
            stretches.append(steady.run(llm, prompts, options.steps))
    for index, (name, llm) in enumerate(engines):
        advance(f"{name}: profiling")
        last = index == len(engines) - 1
        steps = min(PROFILED_STEPS, options.steps)
        profiled = trace.run(llm, prompts, steps, options.trace if last else None)
        fixed = result.machine.product_seconds
        measured = timed[index], works[index], profiled
        result.runs.append(_assemble(name, llm, *measured, fixed, load))


def _assemble(
    name: str,
    llm: LLM,
    stretches: Sequence[steady.Stretch],
    counted: tuple[dict[str, Work], int],
    profiled: trace.Profiled,
    product_seconds: float,
    load: float,
) -> RunProfile:
    works, counted_steps = counted
    seconds = steady.medians(stretches)
    weights: dict[object, int] = {}
    for work in works.values():
        weights |= {key: size for key, (_, size) in work.weights.items()}
    cached = sum(work.cache_bytes for work in works.values()) / counted_steps
    working_set = sum(weights.values()) + cached
    bandwidth = read_bandwidth(llm.target.device, max(1, int(working_set)))
    figures = tuple(
        figures_of(
            phase,
            seconds[phase],
            works.get(phase, Work()),
            counted_steps,
            split(profiled, phase, seconds[phase], llm.target.device.type, product_seconds),
            bandwidth,
        )
        for phase in PHASES
    )
    timed = sum((stretch.sums for stretch in stretches), StepSums())
    step_seconds, slow = sum(seconds.values()), profiled.stretch.sums.mean_seconds(*PHASES)
    return RunProfile(
        name=name,
        figures=figures,
        tokens_per_second=timed.tokens / timed.steps / step_seconds,
        tokens_per_step=timed.tokens / timed.steps,
        context=stretches[0].context,
        working_set=working_set,
        drafts=not isinstance(llm.engine.drafter, NoDrafter),
        drafted=timed.drafted,
        accepted=timed.accepted,
        drafters=sum((Counter(stretch.drafters) for stretch in stretches), Counter()),
        not_drafted=sum((Counter(stretch.not_drafted) for stretch in stretches), Counter()),
        busy=max(profiled.stretch.busy, statistics.median(s.busy for s in stretches)),
        load=load,
        slowdown=slow / step_seconds,
        profiled_steps=profiled.stretch.sums.steps,
        operators=profiled.operators,
    )


def figures_of(
    phase: str,
    seconds: float,
    work: Work,
    steps: int,
    parts: tuple[float, float, float],
    bandwidth: float,
) -> Figures:
    """A phase's figures for one of the ``steps`` in which ``work`` was counted."""
    read_once = work.distinct_bytes * steps
    return Figures(
        name=phase,
        seconds=seconds,
        kernels=parts[0],
        launches=parts[1],
        python=parts[2],
        calls=work.ops / steps,
        kernel_calls=work.kernels / steps,
        bytes=work.bytes / steps,
        flops=work.flops / steps,
        parameters=work.parameters,
        passes=work.weight_bytes / read_once if read_once else 0.0,
        rows=work.rows,
        bandwidth=bandwidth,
        weight_bits=8 * work.distinct_bytes / work.parameters if work.parameters else 0.0,
    )


def split(
    profiled: trace.Profiled, phase: str, seconds: float, device: str, product_seconds: float
) -> tuple[float, float, float]:
    """``seconds`` of a phase as those in kernels, in calling operators, and between operators.

    Shares come from the profiled steps, less what recording took: each event costs the same, half
    of it before its own clock starts. ``product_seconds`` of every product and attention is the
    price of its call. On CUDA kernels are what the device did, and the rest of the phase, in which
    it waited, goes by the host's shares.
    """
    share, cost = profiled.shares.get(phase, _NO_SHARE), profiled.event_seconds
    wall = share.wall - share.events * cost
    if wall <= 0:
        return 0.0, 0.0, seconds
    called = share.seconds - (share.events - share.calls / 2) * cost
    called = min(max(called, 0.0), wall)
    if device == "cuda":
        kernels = min(seconds, share.device / profiled.stretch.sums.steps)
        launches = (seconds - kernels) * called / wall
        return kernels, launches, seconds - kernels - launches
    work = share.kernel_seconds - (share.kernel_events - share.kernel_calls / 2) * cost
    work -= share.kernel_calls * product_seconds
    work = min(max(work, 0.0), called)
    scale = seconds / wall
    return work * scale, (called - work) * scale, (wall - called) * scale
