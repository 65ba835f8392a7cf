"""``paceline recommend``: what to type for a model on this machine, before it is fetched."""

from __future__ import annotations

from dataclasses import MISSING

from rich.console import Console

from paceline.cli.options import expand
from paceline.cli.output import print_json
from paceline.core.stages import stage
from paceline.lab.report.render import print_table
from paceline.settings import setting


@expand
def recommend(
    model: str = setting(MISSING, "Folder, GGUF file, built-in or hub name.", flags=("MODEL",)),
    memory: int | None = setting(
        None, "What the process may take, as in 16G.", kind="size", shown="what is free"
    ),
    as_json: bool = setting(False, "Print one JSON object instead.", flags=("--json",)),
) -> int:
    """Say what a model would run at here, plainly, with drafts, in 8 and 4 bits, and what to type.

    Reads the headers of its files alone, and measures this machine for 10 to 20 seconds.

    Exits with 1 if no form of it fits into the memory.
    """
    with stage("starting"):
        from paceline.lab import recommend as lab
    advice = lab.recommend(model, memory)
    if as_json:
        print_json(advice.record)
    else:
        print_table(advice.table, Console())
        print(*advice.notes, *advice.lines, sep="\n")
    return int(advice.best is None)
