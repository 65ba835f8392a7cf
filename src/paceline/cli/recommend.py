"""``paceline recommend``: what to type for a model on this machine, before it is fetched."""

from __future__ import annotations

from dataclasses import MISSING

from paceline.cli.options import expand
from paceline.cli.output import JsonOptions
from paceline.core.stages import stage
from paceline.settings import setting


@expand
def recommend(
    output: JsonOptions,
    model: str = setting(MISSING, "Folder, GGUF file, built-in or hub name.", flags=("MODEL",)),
    memory: int | None = setting(
        None, "What the process may take, as in 16G.", kind="size", shown="what is free"
    ),
) -> int:
    """Say what a model would run at here, plainly, with drafts, in 8 and 4 bits, and what to type.

    Reads the headers of its files alone, and measures this machine for about 8 seconds.

    Exits with 1 if no form of it fits into the memory.
    """
    with stage("starting"):
        from paceline.lab import recommend as lab
    advice = lab.recommend(model, memory)
    output.show(advice.record, advice.table, *advice.notes, *advice.lines)
    return int(advice.best is None)
