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
    """An LLM and its name. ``ends``: tokens that end a request before its token limit."""

    name: str
    llm: LLM
    ends: frozenset[int] = frozenset()


def together(
    engines: Sequence[WaveEngine],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    turn: float = 0.1,
) -> list[Drive]:
    """Let every engine decode all ``prompts`` as one batch, in turns of ``turn`` seconds.

    Each engine has its own clock, and disturbances of the machine affect all of them equally:
    consecutive runs differ by 10 % for no reason, these by 1 %. Returns the closed drives."""
    requests = list(zip(prompts, params, strict=True))
    drives = [
        Drive(e.llm.engine, [sequence(ids, how, e.ends) for ids, how in requests]) for e in engines
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
