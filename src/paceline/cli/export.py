"""``paceline export``: take what was chosen or measured here to another engine."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import FORCE, print_json, replace_anything
from paceline.core.stages import info
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline.lab.export.speculation import Export

ENGINES = "vllm|sglang|tensorrt-llm|llama.cpp|openvino"


@expand
def export(
    engine: ModelOptions,
    to: str = setting(MISSING, "The engine.", metavar=ENGINES),
    out: Path | None = setting(
        None, "Folder to write: command, configuration and converted heads."
    ),
    force: bool = setting(False, FORCE),
    as_json: bool = setting(False, "Print one JSON object.", flags=("--json",)),
) -> None:
    """Say the same target, draft, length and rule in another engine's words.

    With --config it is what `paceline tune` found. What the engine has no equivalent of is
    refused by name, or approximated, with what that costs.
    """
    replace_anything(force)
    from paceline.lab.export import export as run

    made = run(to, engine.model, engine.resolved_draft, **engine.speculation(), out=out)
    if as_json:
        print_json(made.record())
    else:
        _show(made, out)


def _show(made: Export, out: Path | None) -> None:
    """What there is to run, as it can be pasted, and then what is not the same."""
    for step in made.steps:
        print(step)
    print(made.command_line)
    for approximation in made.approximations:
        info(f"approximated: {approximation.line()}")
    if made.head is None and out is None and "eagle" in str(made.config):
        info("note: the head is not converted; give --out FOLDER for that")
    info(f"checked against {made.version}")
