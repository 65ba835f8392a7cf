"""Steady steps under ``torch.profiler``: whose time it is, and a trace that Perfetto shows."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.errors import ConfigError
from paceline.files import telling, write_aside
from paceline.files.ownership import check_file
from paceline.lab.profiling import steady
from paceline.lab.profiling.work import is_kernel
from paceline.llm import LLM
from paceline.model.measure import synchronise

PREFIX = "paceline: "  # of the ranges in the trace
SUFFIXES = (".json", ".json.gz")
_CALLS = 1000


@dataclass
class Share:
    """What one phase did under the profiler, sums over all steps. Seconds on the host, each
    call's and each gap's at the median over the times that the phase called the same operators.

    ``wall``: the phase itself. ``calls``: operators that Python called, ``events``: with those
    that they called in turn, ``seconds``: within them; the same three for products and attention
    alone. ``launches`` of CUDA kernels and the seconds that the ``device`` worked on them.
    """

    wall: float = 0.0
    calls: int = 0
    events: int = 0
    seconds: float = 0.0
    kernel_calls: int = 0
    kernel_events: int = 0
    kernel_seconds: float = 0.0
    launches: int = 0
    device: float = 0.0


@dataclass
class _Passage:
    """One time that a step went through a phase: its seconds, and those of the operators that it
    called, by name."""

    wall: float = 0.0
    calls: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Operator:
    """One operator under the profiler: calls, and seconds of its own, without what it called, both
    over all steps. Each step that called it counts at their median."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profiled:
    """Steady steps under the profiler, which slows them: use the shares, not the seconds."""

    stretch: steady.Stretch
    shares: dict[str, Share]  # by phase
    operators: tuple[Operator, ...]  # the dearest first
    event_seconds: float  # what recording one event cost


def check_path(path: str | Path) -> None:
    """Refuse a trace that could not be written, before the work. Raises ConfigError."""
    path = Path(path)
    check_file(path, "the trace", is_trace)
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"trace {str(path)!r}: end its name in .json or .json.gz")
    if path.is_dir():
        raise ConfigError(f"trace {str(path)!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"trace {str(path)!r}: there is no folder {path.parent}; create it first")
    new = not path.exists()
    try:
        path.open("ab").close()  # permissions alone do not tell: read-only mounts, /proc
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"trace {str(path)!r} cannot be written: {error.strerror}; choose another place"
        ) from None


def is_trace(file: Path) -> bool:
    """Whether ``run`` wrote a file: it holds the ranges that stand for our phases."""
    content = file.read_bytes()
    return f'"{PREFIX}'.encode() in (gzip.decompress(content) if file.suffix == ".gz" else content)


def run(
    llm: LLM, prompts: Sequence[list[int]], steps: int, trace: str | Path | None = None
) -> Profiled:
    """Decode as ``steady.run`` does, under the profiler; ``trace`` is where it is written.

    Only the steady steps are profiled; step and phases are ranges in it. Raises ConfigError.
    """
    device = llm.target.device
    recorder = profile(activities=_activities(device))
    with _recording(recorder) as around:
        stretch = steady.run(llm, prompts, steps, around)
    if trace is not None:
        _export(recorder, Path(trace))
    events: list[Any] = list(recorder.events() or ())  # type: ignore[no-untyped-call]
    cost = event_seconds(device)
    return Profiled(stretch, shares(events), operators(events, device.type), cost)


def _export(recorder: Any, path: Path) -> None:
    """Write the trace, or leave what is there. Raises WriteError."""
    with telling("the trace", path):
        folder = tempfile.mkdtemp(prefix=".trace.", suffix=".partial", dir=path.parent)
        raw = Path(folder, "trace.json")
        try:
            recorder.export_chrome_trace(str(raw))
            _check_whole(raw)
            with raw.open("rb") as source, write_aside(path, "the trace", is_trace) as sink:
                if path.suffix == ".gz":
                    with gzip.GzipFile(fileobj=sink, mode="wb") as packed:
                        shutil.copyfileobj(source, packed)
                else:
                    shutil.copyfileobj(source, sink)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_whole(file: Path) -> None:
    """The profiler's library says nothing when the disk is full: the trace ends early, if any."""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        stream.seek(-min(64, file.stat().st_size), os.SEEK_END)
        if stream.read().rstrip().endswith(b"}"):
            return
    raise OSError(errno.ENOSPC, "the profiler wrote less than a whole trace, as on a full disk")


@contextmanager
def _recording(recorder: Any) -> Iterator[steady.Enter]:
    """Start the profiler at the first step, so that prompts and warm-up are not in it."""
    running = False

    def around(phase: str) -> Any:
        nonlocal running
        if not running:
            running = True
            recorder.start()
        return record_function(PREFIX + phase)

    try:
        yield around
    finally:
        if running:
            recorder.stop()


@torch.inference_mode()
def event_seconds(device: torch.device) -> float:
    """What recording one event costs: a small operator under the profiler, less without it."""
    one = torch.zeros(1, device=device)

    def calls() -> float:
        begin = time.perf_counter()
        for _ in range(_CALLS):
            one.neg_()
        synchronise(device)
        return time.perf_counter() - begin

    calls()
    plain = min(calls() for _ in range(3))
    with profile(activities=_activities(device)):
        recorded = min(calls() for _ in range(3))
    return max(0.0, recorded - plain) / _CALLS


def _activities(device: torch.device) -> list[ProfilerActivity]:
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_device]


def shares(events: Iterable[Any]) -> dict[str, Share]:
    """Sums by phase from profiler events; what is in a step, but in no phase of it, is "other"."""
    share_of: dict[str, Share] = defaultdict(Share)
    passages: dict[str, dict[int, _Passage]] = defaultdict(lambda: defaultdict(_Passage))
    for event in events:
        if _on_device(event):
            continue
        if event.name.startswith(PREFIX):
            name, seconds = event.name.removeprefix(PREFIX), event.cpu_time_total / 1e6
            passages["other" if name == "step" else name][id(event)].wall += seconds
            if event.cpu_parent is not None:
                passages["other"][id(event.cpu_parent)].wall -= seconds
            continue
        chain = _chain(event)
        if chain is None:
            continue
        top, phase = chain
        share = share_of[phase]
        share.events += 1
        share.launches += event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
        share.device += event.self_device_time_total / 1e6
        kernel = is_kernel(top.name)
        share.kernel_events += kernel
        if top is event:
            called = event.name, event.cpu_time_total / 1e6
            passages[phase][id(event.cpu_parent)].calls.append(called)
            share.calls += 1
            share.kernel_calls += kernel
    for phase, runs in passages.items():
        _add_typical(share_of[phase], runs.values())
    return dict(share_of)


def _add_typical(share: Share, passages: Iterable[_Passage]) -> None:
    """Seconds of the passages: those that called the same operators are alike, so each of their
    calls counts at its median, and so does what passed between them."""
    alike: dict[tuple[str, ...], list[_Passage]] = defaultdict(list)
    for passage in passages:
        alike[tuple(name for name, _ in passage.calls)].append(passage)
    for names, group in alike.items():
        seconds = [[taken for _, taken in passage.calls] for passage in group]
        typical = [statistics.median(step_seconds) for step_seconds in zip(*seconds, strict=True)]
        called = len(group) * sum(typical)
        kernels = sum(
            seconds for name, seconds in zip(names, typical, strict=True) if is_kernel(name)
        )
        pairs = zip(group, seconds, strict=True)
        between = statistics.median(passage.wall - sum(taken) for passage, taken in pairs)
        share.seconds += called
        share.kernel_seconds += len(group) * kernels
        share.wall += called + len(group) * between


def operators(events: Iterable[Any], device: str) -> tuple[Operator, ...]:
    """All operators of the steps, the dearest first: by device time on CUDA, else the host's."""
    calls: dict[str, int] = defaultdict(int)
    by_step: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.name.startswith(PREFIX) or _on_device(event) or _chain(event) is None:
            continue
        on_device = event.self_device_time_total
        seconds = (on_device if device == "cuda" else event.self_cpu_time_total) / 1e6
        calls[event.name] += 1
        by_step[event.name][_step_of(event)] += seconds
    listed = [
        Operator(name, calls[name], len(steps) * statistics.median(steps.values()))
        for name, steps in by_step.items()
    ]
    return tuple(sorted(listed, key=lambda operator: -operator.seconds))


def _step_of(event: Any) -> int:
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return id(event)


def _on_device(event: Any) -> bool:
    return bool(event.device_type.name != "CPU")


def _chain(event: Any) -> tuple[Any, str] | None:
    """The operator that Python called, of which this event is a part, and its phase.

    None for what is not in a step: another thread, or the profiler's own.
    """
    top = event
    while top.cpu_parent is not None and not top.cpu_parent.name.startswith(PREFIX):
        top = top.cpu_parent
    if top.cpu_parent is None:
        return None
    phase = top.cpu_parent.name.removeprefix(PREFIX)
    return top, "other" if phase == "step" else phase
