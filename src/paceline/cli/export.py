"""``paceline export``: take what was chosen or measured here to another engine."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import WriteOptions, print_json
from paceline.core.stages import info
from paceline.settings import setting

ENGINES = "vllm|sglang|tensorrt-llm|llama.cpp|openvino"


@expand
def export(
    engine: ModelOptions,
    output: WriteOptions,
    to: str = setting(MISSING, "The engine.", metavar=ENGINES),
    out: Path | None = setting(None, "Folder for command, configuration and converted heads."),
) -> None:
    """Say the same target, draft, length and rule in another engine's words.

    With --config it is what `paceline tune` found. What the engine has no equivalent of is
    refused by name, or approximated, with what that costs.
    """
    from paceline.lab.export import export as run

    made = run(to, engine.model, engine.resolved_draft, **engine.speculation(), out=out)
    if output.as_json:
        print_json(made.record())
        return
    for line in (*made.steps, made.command_line):  # as it can be pasted
        print(line)
    for approximation in made.approximations:
        info(f"approximated: {approximation.line()}")
    if made.head is None and out is None and "eagle" in str(made.config):
        info("note: the head is not converted; give --out FOLDER for that")
    info(f"checked against {made.version}")
