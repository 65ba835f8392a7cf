"""Runs an engine over requests and records every step, with token ids in and out: the one loop for
everything that measures or compares decoding. (``LLM`` and the server share steps among callers and
handle texts, deadlines and cancelling.)"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SEQUENCE_IDS, SequenceState, Sums
from paceline.core.sequence import DraftCounts as DraftCounts
from paceline.engine.clock import PHASES
from paceline.engine.engine import Engine
from paceline.errors import PacelineError


class StandstillError(Exception):
    """The engine has work but commits nothing: a bug in the drafter or the rule."""


def sequence(
    tokens: Sequence[int],
    params: SamplingParams,
    stop_ids: frozenset[int] = frozenset(),
    prompt_length: int | None = None,
) -> SequenceState:
    """A new request. Tokens after ``prompt_length`` count as output."""
    length = len(tokens) if prompt_length is None else prompt_length
    return SequenceState(next(SEQUENCE_IDS), list(tokens), length, params, stop_ids)


@dataclass
class DrivenStep:
    """One step. ``ended`` on the drive's clock; ``seconds`` by phase, known once the next step has
    been taken or the drive has ended (asking before would make a GPU wait)."""

    commits: Sequence[Commit]
    ended: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """Whether all sequences only decode: none reads a prompt."""
        return bool(self.commits) and all(c.tokens and c.scheduled == 1 for c in self.commits)


@dataclass(frozen=True)
class StepSums(Sums):
    """Sums over steps: sequences, tokens gained and drafted, seconds by phase. ``reached[i]``
    drafts had a token to try at position i, ``accepted_at[i]`` of them were accepted. ``context``:
    cached tokens when the steps began."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    context: int = 0

    @classmethod
    def of(cls, steps: Iterable[DrivenStep]) -> StepSums:
        listed = list(steps)
        commits = [commit for step in listed for commit in step.commits]
        deepest = max((commit.reached for commit in commits), default=0)
        return cls(
            steps=len(listed),
            sequences=len(commits),
            tokens=sum(len(commit.tokens) for commit in commits),
            drafted=sum(commit.drafted for commit in commits),
            accepted=sum(len(commit.path) for commit in commits),
            reached=tuple(sum(i < c.reached for c in commits) for i in range(deepest)),
            accepted_at=tuple(sum(i < len(c.path) for c in commits) for i in range(deepest)),
            seconds={
                phase: sum(step.seconds.get(phase, 0.0) for step in listed) for phase in PHASES
            },
            context=sum(commit.position for commit in commits),
        )

    @property
    def whole(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.whole if self.whole else 0.0

    def mean_seconds(self, *phases: str) -> float:
        """Seconds of these phases in a step."""
        return sum(self.seconds[phase] for phase in phases) / self.steps

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance by position, given that all earlier tokens were accepted."""
        pairs = zip(self.accepted_at, self.reached, strict=True)
        return tuple(won / tried for won, tried in pairs)

    @property
    def acceptance(self) -> float:
        """Share accepted of all positions that were tried."""
        tried = sum(self.reached)
        return sum(self.accepted_at) / tried if tried else 0.0


class Drive:
    """An engine over ``seqs``: a closed loop.

    ``clients`` have one request each under way and send the next when it ends; None sends all at
    once. The clock, ``seconds``, runs while the drive works, so several drives may take turns.

    with Drive(engine, seqs, clients=4) as drive:
        for step in drive:
            ...

    At the end of the block unfinished requests are dropped: the engine can go on."""

    def __init__(
        self, engine: Engine, seqs: Iterable[SequenceState], clients: int | None = None
    ) -> None:
        self.engine = engine
        self.seqs = list(seqs)
        self.clients = len(self.seqs) if clients is None else clients
        self.running: dict[int, SequenceState] = {}
        self.steps: list[DrivenStep] = []
        self.seconds = 0.0
        self._waiting = deque(self.seqs)
        self._known = engine.clock.totals()

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            start = time.perf_counter()
            self._account(self.engine.clock.totals())  # on a GPU this waits for the last step
            self.seconds += time.perf_counter() - start

    def __iter__(self) -> Iterator[DrivenStep]:
        while self.busy:
            yield self.step()

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(seq.generated for seq in self.seqs)

    @property
    def counts(self) -> DraftCounts:
        """Of all requests together."""
        return sum((seq.counts for seq in self.seqs), DraftCounts())

    def run(self, between: Callable[[], object] = lambda: None) -> Drive:
        """Run to the end, timed as a whole; ``between`` is called after every step and may raise.
        Raises PacelineError if a request fails."""
        start = time.perf_counter() - self.seconds
        with self:
            for step in self:
                between()
                failed = next((c.error for c in step.commits if c.error is not None), None)
                if failed is not None:
                    raise PacelineError(f"nothing can be measured, as a request failed: {failed}")
        self.seconds = time.perf_counter() - start
        return self

    def step(self) -> DrivenStep:
        """Send what is due and take one step. Raises StandstillError, and what the engine does."""
        start = time.perf_counter() - self.seconds
        while self._waiting and len(self.running) < self.clients:
            seq = self._waiting.popleft()
            self.running[seq.seq_id] = seq
            self.engine.add(seq)
        commits = self.engine.step()
        self.seconds = time.perf_counter() - start
        self._account(dict(self.engine.clock.seconds))
        if not any(c.tokens or c.scheduled or c.finish_reason for c in commits):
            raise StandstillError(
                "a step committed no token although sequences were waiting for one"
            )
        for commit in commits:
            if commit.finish_reason is not None:
                self.running.pop(commit.seq_id, None)
        self.steps.append(DrivenStep(commits, self.seconds))
        return self.steps[-1]

    def close(self) -> None:
        """Drop what is unfinished or unsent."""
        self._waiting.clear()
        for seq_id in list(self.running):
            self.drop(seq_id)

    def drop(self, seq_id: int) -> None:
        """End a request early."""
        self.engine.abort(seq_id)
        self.running.pop(seq_id, None)

    def _account(self, known: dict[str, float]) -> None:
        """Seconds of the last step but one: the clock does not know the last."""
        if self.steps and not self.steps[-1].seconds:
            before = self._known
            self.steps[-1].seconds = {phase: known[phase] - before[phase] for phase in known}
        self._known = known
