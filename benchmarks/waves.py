"""Engines over one loaded target that decode the same requests, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, sequence

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass(frozen=True)
class WaveEngine:
    """An LLM under a name. ``ends`` are tokens that end a request before its limit."""

    name: str
    llm: LLM
    ends: frozenset[int] = frozenset()


def together(
    engines: Sequence[WaveEngine],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    turn: float = 0.1,
) -> list[Drive]:
    """All of ``prompts`` at once by every engine; they take turns of ``turn`` seconds.

    Each has a clock of its own. So the machine's moods meet all of them alike: where runs one after
    another differ by 10 % for no reason, these differ by 1 %. Returns how each went, closed.
    """
    requests = [*zip(prompts, params, strict=True)]
    drives = [
        Drive(one.llm.engine, [sequence(ids, how, one.ends) for ids, how in requests])
        for one in engines
    ]
    try:
        while any(drive.busy for drive in drives):
            for drive in drives:
                until = drive.seconds + turn
                while drive.busy and drive.seconds < until:
                    drive.step()
    finally:
        for drive in drives:
            drive.close()
    return drives


def texts_of(drive: Drive) -> list[tuple[int, ...]]:
    return [tuple(seq.tokens[seq.prompt_length :]) for seq in drive.seqs]
