"""The model card: where the weights come from, and how good they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from paceline.files import replace_in
from paceline.train.acceptance import AcceptanceCounts, total
from paceline.train.records import Source, read_records
from paceline.train.trainer import DraftingTrainer, Trainer

_LOSSES = 12  # rows of the table of losses


def licences(path: Path, exclude: tuple[str, ...]) -> Counter[str]:
    """How many records a corpus file gives under each licence, without the excluded ones."""
    return Counter(str(record.get("license", "unknown")) for record in read_records(path, exclude))


def data_table(sources: list[Source], exclude: tuple[str, ...]) -> list[str]:
    """Markdown: each file with its weight and its records by licence."""
    rows = ["| File | Weight | Records by licence |", "|---|---|---|"]
    for source in sources:
        counts = ", ".join(
            f"{name} {n:,}" for name, n in licences(source.path, exclude).most_common()
        )
        rows.append(f"| `{source.path.name}` | {source.weight:g} | {counts} |")
    return rows


def validation_table(history: list[dict[str, Any]]) -> list[str]:
    """Markdown: the last loss on each validation file."""
    measured = [entry for entry in history if entry["validation"]]
    if not measured:
        return ["No validation data was given."]
    rows = ["| Validation file | Nats per token |", "|---|---|"]
    rows += [f"| {name} | {loss:.3f} |" for name, loss in measured[-1]["validation"].items()]
    return rows


def counts_of(entry: dict[str, Any]) -> dict[str, AcceptanceCounts]:
    """The held-out acceptance of one measurement in a history, by file."""
    return {name: AcceptanceCounts.from_dict(part) for name, part in entry["acceptance"].items()}


def loss_table(history: list[dict[str, Any]]) -> list[str]:
    """Markdown: loss and mean accepted length in the course of the run."""
    if not history:
        return ["The run was too short for a measurement."]
    rows = ["| Step | Loss | Tokens per step |", "|---:|---:|---:|"]
    every = max(1, -(-len(history) // _LOSSES))
    for entry in history[len(history) - 1 :: -every][::-1]:
        parts = counts_of(entry).values()
        length = f"{total(parts).mean_accepted_length:.2f}" if parts else "-"
        rows.append(f"| {entry['step']:,} | {entry['loss']:.3f} | {length} |")
    return rows


def acceptance_table(history: list[dict[str, Any]]) -> list[str]:
    """Markdown: the last measurement, by task and by position of the draft."""
    if not history or not history[-1]["acceptance"]:
        return ["No validation files were given."]
    tasks = counts_of(history[-1])
    tasks["all"] = total(tasks.values())
    length = len(tasks["all"].reached)
    positions = " | ".join(f"position {j + 1}" for j in range(length))
    rows = [f"| Task | Tokens per step | {positions} |", "|---|---:|" + "---:|" * length]
    for name, figures in tasks.items():
        rates = " | ".join(
            f"{rate:.2f} ({n:,})" for rate, n in zip(figures.rates, figures.reached, strict=True)
        )
        rows.append(f"| {name} | {figures.mean_accepted_length:.2f} | {rates} |")
    return rows


def _figures(trainer: Trainer) -> list[str]:
    """Losses and, of what drafts, acceptance."""
    if not isinstance(trainer, DraftingTrainer):
        return ["## Losses", "", *validation_table(trainer.history), ""]
    config = trainer.config
    return [
        "## Losses",
        "",
        *loss_table(trainer.history),
        "",
        "## Acceptance",
        "",
        f"On texts that the target wrote greedily, at most {config.held_out_tokens} tokens from "
        f"{config.held_out} openings of each validation file, with {trainer.measured_drafts}. "
        "Tokens per step count the target's own. A position's figure is the share accepted of the "
        "drafts that reached it (their number).",
        "",
        *acceptance_table(trainer.history),
        "",
    ]


def write_card(trainer: Trainer, command: str) -> Path:
    """Write the README.md beside the result of a finished run; returns its path.

    ``command`` is what the user typed. Files are named without their folders.
    """
    config = trainer.config
    excluded = ", ".join(config.exclude_licenses) or "nothing"
    lines = [
        "# Model card",
        "",
        trainer.about(),
        "",
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
        *_figures(trainer),
    ]
    folder = trainer.out / trainer.result
    replace_in(folder, {"README.md": "\n".join(lines).encode("utf-8")}, "the model card")
    return folder / "README.md"
