"""Runs of steady decoding (after prefill and the first, slower steps), timed or under
``torch.profiler``."""

from __future__ import annotations

import errno
import gzip
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, DrivenStep, StepTotals, sequence
from paceline.errors import ConfigError
from paceline.files import check_writable, replace_files, write_errors
from paceline.lab.profiling.limits import is_kernel
from paceline.llm import LLM

WARM_UP = 12  # steps after which kernels are chosen and an adaptive draft length has settled
FEWEST = 5  # steps that a measurement needs
_TOKENS_A_STEP = 17  # at most, with an adaptive draft length
# Methods of the engine, with the phase that each belongs to.
_METHODS = {"draft": "draft", "observe": "draft", "forward": "target"}
_METHODS |= {"verify": "verify", "step": "step"}

Enter = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Stretch:
    """A run of steady steps. ``busy``: share of the time in which this thread did not run, because
    others had the processor; 0 on devices. ``drafters``: accepted tokens by drafter.
    ``not_drafted``: steps without a draft, by the controller's reason."""

    sums: StepTotals
    busy: float
    drafters: Counter[str]
    not_drafted: Counter[str]


def run(
    llm: LLM,
    prompts: Sequence[list[int]],
    steps: int,
    around: Enter | None = None,
    inside: AbstractContextManager[Any] | None = None,
) -> Stretch:
    """Decode ``steps`` steady steps, or as many as fit into the context; every call decodes the
    same. The context manager ``around("step")`` is entered around every step, ``around(phase)``
    around its phases, and ``inside`` once around all. Raises ConfigError if too few steps fit."""
    most = (WARM_UP + steps) * _TOKENS_A_STEP
    rooms = [llm.max_model_len - len(ids) for ids in prompts]
    params = [SamplingParams(max_tokens=min(most, room), ignore_eos=True) for room in rooms]
    with Drive(llm.engine, map(sequence, prompts, params)) as drive:
        warm = 0
        while warm < WARM_UP and drive.busy:
            if _all_decode(drive.step(), len(prompts)):
                warm += 1
            elif warm:
                break
        if warm < WARM_UP:
            raise _too_few(warm, min(rooms))
        with inside or nullcontext(), _entered(llm, around) if around else nullcontext():
            known, done = drive.counts, len(drive.steps)
            wall, running = drive.seconds, time.thread_time()
            while len(drive.steps) < done + steps and _all_decode(drive.step(), len(prompts)):
                pass
            running, wall = time.thread_time() - running, drive.seconds - wall
    new_steps = drive.steps[done:]
    if len(new_steps) < FEWEST:
        raise _too_few(WARM_UP + len(new_steps), min(rooms))
    return Stretch(
        StepTotals.of(new_steps),
        max(0.0, 1 - running / wall) if llm.target.device.type == "cpu" else 0.0,
        Counter(drive.counts.by_drafter) - Counter(known.by_drafter),
        Counter(drive.counts.not_drafted) - Counter(known.not_drafted),
    )


def _all_decode(step: DrivenStep, sequences: int) -> bool:
    ended = any(commit.finish_reason is not None for commit in step.commits)
    return step.decodes and len(step.commits) == sequences and not ended


def _too_few(steps: int, room: int) -> ConfigError:
    return ConfigError(
        f"no steady decoding: after {steps} steps a sequence had ended or given up its cache, with "
        f"{room} tokens of room; give shorter prompts, a shorter draft, fewer sequences "
        "or more kv_cache_memory"
    )


@contextmanager
def _entered(llm: LLM, around: Enter) -> Iterator[None]:
    """Wrap the engine's methods so that ``around`` is entered in its steps and phases."""

    def call(phase: str, method: Callable[..., Any], *args: Any) -> Any:
        with around(phase):
            return method(*args)

    for name, phase in _METHODS.items():
        setattr(llm.engine, name, partial(call, phase, getattr(llm.engine, name)))
    try:
        yield
    finally:
        for name in _METHODS:
            delattr(llm.engine, name)


PREFIX = "paceline: "  # of the ranges in the trace


@dataclass
class Share:
    """Seconds of one phase under the profiler, over all steps: ``wall`` in all, ``called`` within
    operators that Python called, ``kernel_seconds`` within matrix products and attention (in
    ``kernel_calls`` calls), and ``device`` on a GPU."""

    wall: float = 0.0
    called: float = 0.0
    kernel_seconds: float = 0.0
    kernel_calls: float = 0
    device: float = 0.0

    def split(
        self, seconds: float, product_seconds: float, steps: int
    ) -> tuple[float, float, float]:
        """Split the ``seconds`` of a phase in a step into time in kernels, in calling operators,
        and in Python between operators. The overhead of a kernel call is ``product_seconds``. On
        CUDA the kernel time is the device's in ``steps``; the rest is split as on the host."""
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
    """Raises ConfigError before measuring: another suffix, or a file that is no trace of ours."""
    if not str(path).endswith((".json", ".json.gz")):
        raise ConfigError(f"trace {str(path)!r}: end its name in .json or .json.gz")
    check_writable(path, "the trace", is_trace)


def is_trace(file: Path) -> bool:
    """Whether ``profiled`` wrote a file: it contains the ranges named after our phases."""
    content = file.read_bytes()
    return f'"{PREFIX}'.encode() in (gzip.decompress(content) if file.suffix == ".gz" else content)


def profiled(
    llm: LLM, prompts: Sequence[list[int]], steps: int, trace: str | Path | None = None
) -> tuple[Stretch, dict[str, Share]]:
    """Decode as ``run`` does, under the profiler, which slows the steps: use the shares, not
    the seconds. ``trace``: where it is written. Raises ConfigError."""
    cuda = llm.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    recorder = profile(activities=activities)
    stretch = run(llm, prompts, steps, lambda x: record_function(PREFIX + x), recorder)
    if trace is not None:
        _export(recorder, Path(trace))
    return stretch, shares(recorder.events() or ())  # type: ignore[no-untyped-call]


def _export(recorder: Any, path: Path) -> None:
    """Write the trace, or leave what is there. Raises WriteError."""
    with write_errors("the trace", path):
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trace.", suffix=".partial", dir=folder) as made:
            raw = Path(made, "trace.json")
            recorder.export_chrome_trace(str(raw))
            content = raw.read_bytes() if raw.exists() else b""
        if not content.rstrip().endswith(b"}"):  # the profiler raises nothing on a full disk
            raise OSError(errno.ENOSPC, "the profiler wrote no whole trace, as on a full disk")
    packed = gzip.compress(content) if path.suffix == ".gz" else content
    replace_files({path: packed}, "the trace", is_trace)


def shares(events: Iterable[Any]) -> dict[str, Share]:
    """The shares by phase; "other" is what is in a step but in no phase. Steps that called the same
    operators are grouped, and each group counts with its median, so that one slow call does not
    distort the figures and steps with and without drafts are kept apart."""
    ranges: defaultdict[str, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if _is_range(event) and event.device_type.name == "CPU":
            phase = event.name.removeprefix(PREFIX)
            step = event if phase == "step" else event.cpu_parent
            ranges["other" if phase == "step" else phase][id(step)].append(event)
    return {phase: _typical(map(_share_of, steps.values())) for phase, steps in ranges.items()}


def _is_range(event: Any) -> bool:
    return bool(event.name.startswith(PREFIX))


def _share_of(ranges: Sequence[Any]) -> tuple[tuple[str, ...], Share]:
    """The share of a phase's ``ranges`` in one step, and the operators that Python called there."""
    children = [child for event in ranges for child in event.cpu_children]
    called = [child for child in children if not _is_range(child)]
    kernels = [child for child in called if is_kernel(child.name)]

    def seconds(events: Iterable[Any]) -> float:
        return sum(float(event.cpu_time_total) for event in events) / 1e6

    return tuple(child.name for child in called), Share(
        wall=seconds(ranges) - seconds(filter(_is_range, children)),
        called=seconds(called),
        kernel_seconds=seconds(kernels),
        kernel_calls=len(kernels),
        device=sum(child.device_time_total for child in called) / 1e6,
    )


def _typical(steps: Iterable[tuple[tuple[str, ...], Share]]) -> Share:
    """The sum over steps, each replaced by the median of the steps with the same operators."""
    alike: defaultdict[tuple[str, ...], list[tuple[float, ...]]] = defaultdict(list)
    for operators, share in steps:
        alike[operators].append(astuple(share))
    medians = [
        [len(group) * statistics.median(column) for column in zip(*group, strict=True)]
        for group in alike.values()
    ]
    return Share(*map(sum, zip(*medians, strict=True)))
