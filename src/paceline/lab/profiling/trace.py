"""Steady steps under ``torch.profiler``: whose time it is, and a trace that Perfetto shows."""

from __future__ import annotations

import errno
import gzip
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from paceline.errors import ConfigError
from paceline.files import replace_files, telling
from paceline.files.ownership import check_file
from paceline.lab.profiling import steady
from paceline.lab.profiling.steady import Stretch
from paceline.lab.profiling.work import is_kernel
from paceline.llm import LLM

PREFIX = "paceline: "  # of the ranges in the trace


@dataclass
class Share:
    """What one phase did under the profiler, in all steps. Seconds: ``wall`` of the phase,
    ``called`` within operators that Python called, ``kernel_seconds`` within products and attention
    (``kernel_calls`` of them), ``device`` of a GPU."""

    wall: float = 0.0
    called: float = 0.0
    kernel_seconds: float = 0.0
    kernel_calls: int = 0
    device: float = 0.0

    def split(
        self, seconds: float, product_seconds: float, steps: int
    ) -> tuple[float, float, float]:
        """``seconds`` of the phase in a step as those in kernels, in calling operators, and between
        operators. A call of a product or an attention costs ``product_seconds``. On CUDA kernels
        are what the device did in ``steps``; the rest goes by the host's shares."""
        if self.wall <= 0:
            return 0.0, 0.0, seconds
        called = min(self.called, self.wall)
        if self.device:
            kernels = min(seconds, self.device / steps)
            launches = (seconds - kernels) * called / self.wall
            return kernels, launches, seconds - kernels - launches
        work = min(max(self.kernel_seconds - self.kernel_calls * product_seconds, 0.0), called)
        scale = seconds / self.wall
        return work * scale, (called - work) * scale, (self.wall - called) * scale


def check_path(path: str | Path) -> None:
    """Refuse a trace of unknown kind, or over a file that is none of ours, before the work.
    Raises ConfigError."""
    check_file(path, "the trace", is_trace)
    if not str(path).endswith((".json", ".json.gz")):
        raise ConfigError(f"trace {str(path)!r}: end its name in .json or .json.gz")


def is_trace(file: Path) -> bool:
    """Whether ``run`` wrote a file: it holds the ranges that stand for our phases."""
    content = file.read_bytes()
    return f'"{PREFIX}'.encode() in (gzip.decompress(content) if file.suffix == ".gz" else content)


def run(
    llm: LLM, prompts: Sequence[list[int]], steps: int, trace: str | Path | None = None
) -> tuple[Stretch, dict[str, Share]]:
    """Decode as ``steady.run`` does, under the profiler, which slows the steps: use the shares, not
    the seconds. ``trace``: where it is written. Raises ConfigError."""
    cuda = llm.target.device.type == "cuda"
    recorder = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    )
    stretch = steady.run(llm, prompts, steps, lambda x: record_function(PREFIX + x), recorder)
    if trace is not None:
        _export(recorder, Path(trace))
    return stretch, shares(recorder.events() or ())  # type: ignore[no-untyped-call]


def _export(recorder: Any, path: Path) -> None:
    """Write the trace, or leave what is there. Raises WriteError."""
    with telling("the trace", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        telling("the trace", path),
        tempfile.TemporaryDirectory(prefix=".trace.", suffix=".partial", dir=path.parent) as folder,
    ):
        raw = Path(folder, "trace.json")
        recorder.export_chrome_trace(str(raw))
        content = raw.read_bytes() if raw.exists() else b""
        if not content.rstrip().endswith(b"}"):  # its library says nothing when the disk is full
            raise OSError(errno.ENOSPC, "the profiler wrote no whole trace, as on a full disk")
    packed = gzip.compress(content) if path.suffix == ".gz" else content
    replace_files({path: packed}, "the trace", is_trace)


@dataclass
class _Passage:
    """A phase in one step: seconds of it, of the operators called, by name, and of the device."""

    phase: str
    wall: float = 0.0
    calls: list[tuple[str, float]] = field(default_factory=list)
    device: float = 0.0


def shares(events: Iterable[Any]) -> dict[str, Share]:
    """Sums by phase of profiler events; what is in a step, but in no phase of it, is "other". Of
    passages that called the same operators the medians count, by call and between calls."""
    alike: dict[tuple[str, tuple[str, ...]], list[_Passage]] = defaultdict(list)
    for passage in _passages(events):
        alike[passage.phase, tuple(name for name, _ in passage.calls)].append(passage)
    share_of: dict[str, Share] = defaultdict(Share)
    for (phase, names), group in alike.items():
        share, times = share_of[phase], len(group)
        columns = zip(*([seconds for _, seconds in one.calls] for one in group), strict=True)
        typical = [times * statistics.median(column) for column in columns]
        between = statistics.median(one.wall - sum(s for _, s in one.calls) for one in group)
        kernels = [s for name, s in zip(names, typical, strict=True) if is_kernel(name)]
        share.wall += sum(typical) + times * between
        share.called += sum(typical)
        share.kernel_seconds += sum(kernels)
        share.kernel_calls += times * len(kernels)
        share.device += sum(one.device for one in group)
    return dict(share_of)


def _passages(events: Iterable[Any]) -> Iterable[_Passage]:
    passages: dict[int, _Passage] = {}

    def passage_of(event: Any) -> _Passage:
        name = event.name.removeprefix(PREFIX)
        return passages.setdefault(id(event), _Passage("other" if name == "step" else name))

    for event in events:
        if event.device_type.name != "CPU":
            continue
        seconds, top = event.cpu_time_total / 1e6, event
        if event.name.startswith(PREFIX):
            passage_of(event).wall += seconds
            if event.cpu_parent is not None:
                passage_of(event.cpu_parent).wall -= seconds
            continue
        # The operator that Python called, of which this event is a part.
        while top.cpu_parent is not None and not top.cpu_parent.name.startswith(PREFIX):
            top = top.cpu_parent
        if top.cpu_parent is None:
            continue  # in no step: another thread, or the profiler's own
        passage = passage_of(top.cpu_parent)
        passage.device += event.self_device_time_total / 1e6
        if top is event:
            passage.calls.append((event.name, seconds))
    return passages.values()
