"""The model card of a trained head: for which target, from what, and how often it is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import replace_text
from paceline.train.acceptance import AcceptanceCounts, total
from paceline.train.card import data_table

if TYPE_CHECKING:
    from paceline.train.draft import DraftTrainer
    from paceline.train.heads import HeadTrainer

_LOSSES = 12  # rows of the table of losses


def loss_table(history: list[dict[str, Any]]) -> list[str]:
    """Markdown: loss and mean accepted length in the course of the run."""
    if not history:
        return ["The run was too short for a measurement."]
    rows = ["| Step | Loss | Tokens per step |", "|---:|---:|---:|"]
    every = max(1, -(-len(history) // _LOSSES))
    for entry in history[len(history) - 1 :: -every][::-1]:
        parts = [AcceptanceCounts.from_dict(values) for values in entry["acceptance"].values()]
        length = f"{total(parts).mean_accepted_length:.2f}" if parts else "-"
        rows.append(f"| {entry['step']:,} | {entry['loss']:.3f} | {length} |")
    return rows


def acceptance_table(history: list[dict[str, Any]]) -> list[str]:
    """Markdown: the last measurement, by task and by position of the draft."""
    if not history or not history[-1]["acceptance"]:
        return ["No validation files were given."]
    tasks = {
        name: AcceptanceCounts.from_dict(values)
        for name, values in history[-1]["acceptance"].items()
    }
    tasks["all"] = total(tasks.values())
    length = len(tasks["all"].reached)
    positions = " | ".join(f"position {j + 1}" for j in range(length))
    rows = [f"| Task | Tokens per step | {positions} |", "|---|---:|" + "---:|" * length]
    for name, found in tasks.items():
        rates = " | ".join(
            f"{rate:.2f} ({n:,})" for rate, n in zip(found.rates, found.reached, strict=True)
        )
        rows.append(f"| {name} | {found.mean_accepted_length:.2f} | {rates} |")
    return rows


def run_sections(trainer: HeadTrainer | DraftTrainer, drafts: str, command: str) -> list[str]:
    """Markdown: data, training, losses and acceptance. ``drafts`` says which were tried."""
    config = trainer.config
    excluded = ", ".join(config.exclude_licenses) or "nothing"
    return [
        "## Data",
        "",
        *data_table(trainer.sources, config.exclude_licenses),
        "",
        f"Records left out when their licence contains: {excluded}.",
        "",
        "## Training",
        "",
        f"{trainer.step:,} steps of {config.batch_tokens:,} tokens:",
        "",
        "```",
        command,
        "```",
        "",
        "## Losses",
        "",
        *loss_table(trainer.history),
        "",
        "## Acceptance",
        "",
        f"On texts that the target wrote greedily, at most {config.held_out_tokens} tokens from "
        f"{config.held_out} openings of each validation file, with {drafts}. Tokens per step "
        "count the target's own. A position's figure is the share accepted of the drafts that "
        "reached it (their number).",
        "",
        *acceptance_table(trainer.history),
        "",
    ]


def write_card(folder: Path, lines: list[str]) -> Path:
    """Write ``folder/README.md`` whole or not at all; returns its path."""
    path = folder / "README.md"
    replace_text(path, "\n".join(lines), "the model card")
    return path


def write_head_card(trainer: HeadTrainer, what: str, spec: str, command: str) -> Path:
    """Write ``out/head/README.md`` for a finished run; returns its path.

    ``what`` names the kind of head, ``spec`` the word before the colon of ``--draft``,
    ``command`` is what the user typed. Files are named without their folders.
    """
    config = trainer.config
    target = Path(config.target).name if Path(config.target).exists() else config.target
    parameters = sum(parameter.numel() for parameter in trainer.head.parameters())
    lines = [
        "# Model card",
        "",
        f"{what} for `{target}` ({trainer.num_layers} layers, width {trainer.shape.hidden_size}, "
        f"vocabulary {trainer.vocab_size:,}): {parameters:,} parameters in {config.dtype}, trained "
        "by Paceline on that target's hidden states and probabilities. It drafts for this target "
        f"only: `paceline generate --model TARGET --draft {spec}:FOLDER`.",
        "",
        *run_sections(trainer, trainer.measured_drafts, command),
    ]
    return write_card(trainer.out / "head", lines)
