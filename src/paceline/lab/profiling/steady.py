"""Steady decoding: sequences that are past their prompts and past the first, slower steps."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.clock import PHASES
from paceline.engine.driver import Drive, DrivenStep, StepSums, sequence
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, DataError
from paceline.llm import LLM

WARM_UP = 12  # steps: kernels are chosen, and an adaptive draft length has found its place
FEWEST = 5  # steps: fewer say nothing of a steady state
_TOKENS_A_STEP = 17  # at most, with an adaptive draft length

Enter = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Stretch:
    """Some steady steps. ``busy``: share of the time in which this thread had no processor; 0 where
    it may wait. ``steps``: seconds of each by phase. ``drafters``: accepted tokens by who drafted
    them; ``not_drafted``: a sequence's steps without a draft, by the controller's reason."""

    sums: StepSums
    busy: float
    steps: tuple[Mapping[str, float], ...] = ()
    drafters: Mapping[str, int] = field(default_factory=Counter)
    not_drafted: Mapping[str, int] = field(default_factory=Counter)

    @property
    def context(self) -> float:
        """Cached tokens of an average sequence, halfway."""
        return self.sums.context / self.sums.sequences


def medians(stretches: Sequence[Stretch]) -> dict[str, float]:
    """Seconds of a step by phase. Stretches repeat the same steps: of each the median counts, so
    that a slow call in one round is nothing."""
    same = [*zip(*(stretch.steps for stretch in stretches), strict=False)]
    return {
        phase: statistics.fmean(statistics.median(s[phase] for s in steps) for steps in same)
        for phase in PHASES
    }


def choose(encoded: Sequence[list[int]], concurrency: int, limit: int) -> list[int]:
    """Places of as many prompts as sequences, again from the first if there are too few.

    Only those that leave half of the ``limit`` positions to decode in. Raises DataError if none
    does.
    """
    fitting = [i for i, ids in enumerate(encoded) if 0 < len(ids) <= limit // 2]
    if not fitting:
        shortest = min(map(len, encoded), default=0)
        raise DataError(
            f"no prompt leaves room to decode in: the model sees {limit} tokens, the shortest "
            f"prompt has {shortest}; give prompts of at most {limit // 2}"
        )
    return [fitting[i % len(fitting)] for i in range(concurrency)]


@contextmanager
def decoding(llm: LLM, prompts: Sequence[list[int]], steps: int) -> Iterator[Drive]:
    """Inside, the prompts are read, the warm-up is over and all sequences decode.

    Raises ConfigError if a sequence ends before the warm-up does.
    """
    most = (WARM_UP + steps) * _TOKENS_A_STEP
    remaining = [llm.max_model_len - len(ids) for ids in prompts]
    params = [SamplingParams(max_tokens=min(most, left), ignore_eos=True) for left in remaining]
    with Drive(llm.engine, map(sequence, prompts, params)) as drive:
        done = 0
        while done < WARM_UP and drive.busy:
            all_decode = _all_decode(drive.step(), len(prompts))
            if done and not all_decode:
                break
            done += all_decode
        if done < WARM_UP:
            raise _too_few(done, min(remaining))
        yield drive


def _all_decode(step: DrivenStep, sequences: int) -> bool:
    ended = any(commit.finish_reason is not None for commit in step.commits)
    return step.decodes and len(step.commits) == sequences and not ended


def _too_few(steps: int, remaining: int) -> ConfigError:
    return ConfigError(
        f"no steady decoding: after {steps} steps a sequence had ended or given up its cache, with "
        f"{remaining} tokens of room; give shorter prompts, a shorter draft, fewer sequences "
        "or more kv_cache_memory"
    )


def run(llm: LLM, prompts: Sequence[list[int]], steps: int, around: Enter | None = None) -> Stretch:
    """``steps`` steady steps, or as many as there is room for; the same ones each time.

    ``around("step")`` is entered around every step, and ``around(phase)`` around its phases.
    Raises ConfigError if fewer than ``FEWEST`` fit.
    """
    with decoding(llm, prompts, steps) as drive, inside(llm.engine, around):
        known = drive.counts
        done, seconds, running = len(drive.steps), drive.seconds, time.thread_time()
        while len(drive.steps) < done + steps and _all_decode(drive.step(), len(prompts)):
            pass
        running = time.thread_time() - running
    new_steps = drive.steps[done:]
    if len(new_steps) < FEWEST:
        raise _too_few(WARM_UP + len(new_steps), llm.max_model_len - max(map(len, prompts)))
    wall = drive.seconds - seconds
    busy = max(0.0, 1 - running / wall) if llm.target.device.type == "cpu" else 0.0
    counts = drive.counts
    drafters = Counter(counts.by_drafter) - Counter(known.by_drafter)
    not_drafted = Counter(counts.not_drafted) - Counter(known.not_drafted)
    seconds_of = tuple(step.seconds for step in new_steps)
    return Stretch(StepSums.of(new_steps), busy, seconds_of, drafters, not_drafted)


@contextmanager
def inside(engine: Engine, around: Enter | None) -> Iterator[None]:
    """Enter ``around`` in the engine's steps and phases: from outside, its loop knows nothing."""
    if around is None:
        yield
        return
    members = engine.target, engine.drafter, engine.verifier
    wrapped: Any = engine
    wrapped.step = _Called(engine.step, "step", around)
    wrapped.target = _Called(engine.target, "target", around)
    wrapped.verifier = _Called(engine.verifier, "verify", around)
    wrapped.drafter = _Called(engine.drafter, "draft", around, ("propose", "observe"))
    try:
        yield
    finally:
        engine.target, engine.drafter, engine.verifier = members
        del wrapped.step


class _Called:
    """Stands for a member of the engine and tells when it, or one of its ``methods``, is called."""

    def __init__(self, inner: Any, phase: str, around: Enter, methods: Sequence[str] = ()) -> None:
        self._inner, self._phase, self._around = inner, phase, around
        for name in methods:
            setattr(self, name, _Called(getattr(inner, name), phase, around))

    def __call__(self, *args: Any) -> Any:
        with self._around(self._phase):
            return self._inner(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
