"""Engines over one loaded target that decode the same requests, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, sequence

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass
class Run:
    """What one engine did with a wave of requests. Seconds are wall time, prefill included."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # target steps, of all sequences
    drafting: int = 0  # of them, those that drafted anything
    texts: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class WaveEngine:
    """An LLM under a name. ``ends`` are tokens that end a request before its limit."""

    name: str
    llm: LLM
    ends: frozenset[int] = frozenset()


class _Wave:
    """Requests that one engine decodes together, on a clock that runs while it works."""

    def __init__(
        self, one: WaveEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> None:
        pairs = zip(prompts, params, strict=True)
        self.drive = Drive(one.llm.engine, [sequence(ids, own, one.ends) for ids, own in pairs])

    def work(self, turn: float) -> None:
        """Steps for ``turn`` seconds, at least one."""
        until = self.drive.seconds + turn
        while self.drive.busy and self.drive.seconds < until:
            self.drive.step()

    def end(self) -> Run:
        """Drops what is left."""
        self.drive.close()
        counts = self.drive.counts
        return Run(
            tokens=self.drive.tokens,
            seconds=self.drive.seconds,
            drafted=counts.drafted,
            accepted=counts.accepted,
            steps=counts.target_steps,
            drafting=sum(c.drafted > 0 for step in self.drive.steps for c in step.commits),
            texts=[tuple(seq.tokens[seq.prompt_length :]) for seq in self.drive.seqs],
        )


def together(
    engines: Sequence[WaveEngine],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    turn: float = 0.1,
) -> list[Run]:
    """All of ``prompts`` at once by every engine; they take turns of ``turn`` seconds.

    Each has a clock of its own. So the machine's moods meet all of them alike: where runs one after
    another differ by 10 % for no reason, these differ by 1 %.
    """
    waves = [_Wave(one, prompts, params) for one in engines]
    try:
        while any(wave.drive.busy for wave in waves):
            for wave in waves:
                wave.work(turn)
    finally:
        runs = [wave.end() for wave in waves]
    return runs
