"""Finding the drafter and the settings that decode fastest on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.settings import setting


@dataclass(frozen=True)
class TuneOptions:
    """The expected load, and how candidates are measured. ``source`` names the prompts."""

    concurrency: int = setting(1, "Requests that run at once.", low=1, high=1024)
    temperature: float = setting(
        0.0, "Sampling temperature; 0 is greedy.", low=0.0, flags=("--temperature", "-t")
    )
    max_tokens: int = setting(48, "New tokens per prompt.", low=2)
    rounds: int = setting(4, "Rounds that confirm the result.", low=1)
    source: str = "shipped prompts"
