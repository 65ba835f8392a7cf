"""Steady decoding: sequences that are past their prompts and past the first, slower steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, DrivenStep, StepSums, sequence
from paceline.errors import ConfigError, DataError
from paceline.llm import LLM

WARM_UP = 12  # steps: kernels are chosen, and an adaptive draft length has found its place
FEWEST = 5  # steps: fewer say nothing of a steady state
_TOKENS_A_STEP = 17  # at most, with an adaptive draft length
# Methods of an engine, and the phase that each belongs to.
_METHODS = {"draft": "draft", "observe": "draft", "forward": "target"}
_METHODS |= {"verify": "verify", "step": "step"}

Enter = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Stretch:
    """Some steady steps. ``busy``: share of the time in which this thread had no processor; 0 on
    devices. ``drafters``, ``not_drafted``: as in RunProfile."""

    sums: StepSums
    busy: float
    drafters: Counter[str] = field(default_factory=Counter)
    not_drafted: Counter[str] = field(default_factory=Counter)


def choose(encoded: Sequence[list[int]], concurrency: int, limit: int) -> list[int]:
    """Indices of as many prompts as sequences, of those that leave half of the ``limit`` positions
    to decode in, repeated if there are too few. Raises DataError if none does."""
    fitting = [i for i, ids in enumerate(encoded) if 0 < len(ids) <= limit // 2]
    if not fitting:
        shortest = min(map(len, encoded), default=0)
        raise DataError(
            f"no prompt leaves room to decode in: the model sees {limit} tokens, the shortest "
            f"prompt has {shortest}; give prompts of at most {limit // 2}"
        )
    return [fitting[i % len(fitting)] for i in range(concurrency)]


def run(
    llm: LLM,
    prompts: Sequence[list[int]],
    steps: int,
    around: Enter | None = None,
    inside: AbstractContextManager[Any] | None = None,
) -> Stretch:
    """``steps`` steady steps, or as many as there is room for; the same ones each time.
    ``around("step")`` is entered around every step, and ``around(phase)`` around its phases;
    ``inside`` once around all. Raises ConfigError if fewer than ``FEWEST`` fit."""
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
        StepSums.of(new_steps),
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
    """Enter ``around`` in the engine's steps and phases, of which its loop knows nothing."""

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
