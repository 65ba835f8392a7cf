"""Runs of steady decoding (after prefill and the first, slower steps), timed or traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, DrivenStep, StepTotals, sequence
from paceline.errors import ConfigError
from paceline.files import write_errors
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
    """A run of steady steps. ``drafters``: accepted tokens by drafter. ``not_drafted``: steps
    without a draft, by the controller's reason."""

    sums: StepTotals
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
    same, so drafters forget what earlier calls showed. The context manager ``around("step")`` is
    entered around every step, ``around(phase)`` around its phases, and ``inside`` once around all.
    Raises ConfigError if too few steps fit."""
    most = (WARM_UP + steps) * _TOKENS_A_STEP
    rooms = [llm.max_model_len - len(ids) for ids in prompts]
    params = [SamplingParams(max_tokens=min(most, room), ignore_eos=True) for room in rooms]
    _forget(llm.engine.drafter)
    with llm.engine.clock.waiting(), Drive(llm.engine, map(sequence, prompts, params)) as drive:
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
            while len(drive.steps) < done + steps and _all_decode(drive.step(), len(prompts)):
                pass
    new_steps = drive.steps[done:]
    if len(new_steps) < FEWEST:
        raise _too_few(WARM_UP + len(new_steps), min(rooms))
    return Stretch(
        StepTotals.of(new_steps),
        Counter(drive.counts.by_drafter) - Counter(known.by_drafter),
        Counter(drive.counts.not_drafted) - Counter(known.not_drafted),
    )


def _forget(drafter: Any) -> None:
    """Drop what a drafter and its members learnt from earlier requests."""
    getattr(drafter, "clear", lambda: None)()
    for member in getattr(drafter, "members", ()):
        _forget(member)


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


def check_path(path: str | Path) -> None:
    """Raises ConfigError for a suffix of another format."""
    if not str(path).endswith((".json", ".json.gz")):
        raise ConfigError(f"trace {str(path)!r}: end its name in .json or .json.gz")


def write_trace(llm: LLM, prompts: Sequence[list[int]], steps: int, path: str | Path) -> None:
    """Decode as ``run`` does, under ``torch.profiler``, which slows the steps, and write its trace.
    Raises ConfigError and WriteError."""
    cuda = llm.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    recorder = profile(activities=activities)
    run(llm, prompts, steps, lambda x: record_function(PREFIX + x), recorder)
    with write_errors("the trace", path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        recorder.export_chrome_trace(str(path))
