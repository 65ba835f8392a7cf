"""How the engine recovers from a failed step. The step is undone and tried again, in this order::

    unchanged              a failure that does not return is only logged
    each sequence alone    without drafts: those that fail end with an error; if none does, the
                           sequences are decoded plainly from now on
    one dummy token        if every sequence failed; if this fails as well, raise EngineLostError

A strict engine raises the first failure instead. Exceptions are not stored, because their
tracebacks would keep the failed step's tensors alive.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from paceline.control.controller import Decision
from paceline.core.batch import Commit, Plan, Span
from paceline.core.sequence import SequenceState
from paceline.engine.clock import PhaseClock
from paceline.engine.scheduler import Scheduler
from paceline.errors import EngineLostError, PacelineError
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

log = logging.getLogger("paceline.engine")

_MAX_MESSAGE = 300  # characters


class Failure(NamedTuple):
    """An exception as one line of text, and the file and line that raised it."""

    message: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = " ".join(str(error).split())[:_MAX_MESSAGE]
        kind = type(error).__name__
        if not isinstance(error, PacelineError):
            text = f"{kind}: {text}" if text else kind
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return cls(text or kind, location)

    def __str__(self) -> str:
        return f"{self.message} ({self.where})"


def error_commit(seq: SequenceState, failure: Failure | str) -> Commit:
    """Log a failure and make the commit that ends the sequence with it."""
    log.error("request %d ends with an error: %s", seq.seq_id, failure)
    message = failure.message if isinstance(failure, Failure) else failure
    return Commit(seq.seq_id, (), position=seq.cached, finish_reason="error", error=message)


MakePlan = Callable[[], Plan]
Step = Callable[[MakePlan], None]
TryStep = Callable[[MakePlan], Failure | None]


class SteppedEngine(Protocol):
    """The part of Engine that recovery uses (recovery and engine must not import each other)."""

    target: CausalModel
    cache: PagedCache
    scheduler: Scheduler
    clock: PhaseClock
    ready: list[Commit]
    strict: bool

    def select_drafts(self, seqs: Sequence[SequenceState]) -> Sequence[Decision]: ...
    def max_nodes(self, length: int) -> int: ...
    def record_step(self, commits: Sequence[Commit], start: float) -> None: ...
    def forget(self, seq_id: int) -> None: ...
    def abort(self, seq_id: int) -> None: ...


def step_with_recovery(engine: SteppedEngine, step: Step) -> list[Commit]:
    """Run a step, with the retries above if it fails, and return its commits."""
    try_step = partial(_try_step, engine, step)
    make_plan = partial(engine.scheduler.plan, engine.select_drafts, engine.max_nodes)
    failure = try_step(make_plan)
    if failure is not None:
        log.warning("a step failed and was undone: %s; it is tried again", failure)
        if engine.target.device.type == "cuda":
            with suppress(Exception):  # the device may be lost
                torch.cuda.empty_cache()  # fragmentation may be the cause
        failure = try_step(make_plan)
    if failure is not None:
        _step_one_by_one(engine, try_step, failure)
    return engine.ready


def _try_step(engine: SteppedEngine, step: Step, make_plan: MakePlan) -> Failure | None:
    """Run a step, whose commits are appended to ``ready``. If it fails, undo it and return the
    failure; a failure after the commits can only come from drafters, so only drafts stop."""
    before, start = len(engine.ready), time.perf_counter()
    engine.clock.start()
    try:
        try:
            step(make_plan)
        finally:
            if commits := engine.ready[before:]:
                engine.record_step(commits, start)
    except BaseException as error:
        _undo(engine)
        if engine.strict or not isinstance(error, Exception):
            raise
        failure = Failure.of(error)
        if len(engine.ready) == before:
            return failure
        _stop_drafting(engine.scheduler.running, failure)
    return None


def _undo(engine: SteppedEngine) -> None:
    """Restore the cache of all sequences to the last commits and drop their drafting state."""
    for seq in engine.scheduler.waiting:
        engine.cache.free(seq.seq_id)  # the step may have failed while admitting it
    for seq in engine.scheduler.running:
        engine.cache.commit(seq.seq_id, seq.tokens, seq.cached)
    for seq in engine.scheduler.running:
        engine.forget(seq.seq_id)


def _stop_drafting(seqs: Sequence[SequenceState], failure: Failure) -> None:
    """Decode these sequences without drafts from now on."""
    log.error("drafting failed: %s; %d requests go on without drafts", failure, len(seqs))
    for seq in seqs:
        seq.drafts = False


def _step_one_by_one(engine: SteppedEngine, try_step: TryStep, failure: Failure) -> None:
    """Step each sequence alone without a draft, and end those that fail. If none does, the cause
    may be the drafts, so they stop. ``failure`` is that of the whole batch. Raises EngineLostError
    after dropping all sequences."""
    scheduler = engine.scheduler
    failed: list[tuple[SequenceState, Failure]] = []
    any_succeeded = False
    drafting = [seq for seq in scheduler.running if seq.drafts]
    for seq in drafting:
        seq.drafts = False
    for seq in list(scheduler.running):
        if seq not in scheduler.running:
            continue  # an older sequence has preempted it in this loop
        own_failure = try_step(partial(scheduler.plan_alone, seq))
        if own_failure is None:
            any_succeeded = True
        else:
            failed.append((seq, own_failure))
    if not failed and not any_succeeded and scheduler.waiting:
        failed.append((scheduler.waiting[0], failure))  # admitting it is what fails
    if not any_succeeded and not _target_runs(engine):
        log.critical("every forward fails, the engine is lost: %s", failure)
        for seq in [*scheduler.running, *scheduler.waiting]:
            engine.abort(seq.seq_id)
        raise EngineLostError(f"every forward fails ({failure.message})")
    engine.ready += [error_commit(seq, own_failure) for seq, own_failure in failed]
    if not failed and drafting:
        _stop_drafting(drafting, failure)
        return
    for seq in drafting:
        seq.drafts = True


def _target_runs(engine: SteppedEngine) -> bool:
    """Whether the target still computes logits for one token, in a cache made for this test."""
    target = engine.target
    try:
        cache = target.new_cache(1, 1)
        cache.admit(0, (0,))
        cache.reserve(0, 1)
        # ``tolist`` waits for the device, so errors of its kernels are raised here.
        with torch.inference_mode():
            target(cache.batch_of([Span.of(0, 0, (0,))]), cache).logits.argmax(-1).tolist()
    except Exception:
        return False
    return True
