"""The model card: where the weights come from, and how good they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.files import replace_in
from paceline.train.acceptance import AcceptanceCounts, total
from paceline.train.records import Records, Source
from paceline.train.trainer import Trainer

_LOSSES = 12  # rows of the table of losses
_NOTHING = "Nothing was measured."


def _table(columns: str, aligned: str, rows: Iterable[Iterable[object]]) -> str:
    """In Markdown."""
    return "\n".join([columns, aligned, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _data_table(sources: Sequence[Source], exclude: tuple[str, ...]) -> str:
    """Each file with its weight and its records by licence."""
    rows = []
    for source in sources:
        records = Records(source.path, exclude)
        counts = Counter(str(record.get("license", "unknown")) for record in records)
        licences = ", ".join(f"{name} {n:,}" for name, n in counts.most_common())
        rows.append((f"`{source.path.name}`", f"{source.weight:g}", licences))
    return _table("| File | Weight | Records by licence |", "|---|---|---|", rows)


def counts_of(entry: dict[str, Any]) -> dict[str, AcceptanceCounts]:
    """The held-out acceptance of one measurement in a history, by file."""
    return msgspec.convert(entry["acceptance"], dict[str, AcceptanceCounts])


def _loss_table(history: Sequence[dict[str, Any]]) -> str:
    """Loss and mean accepted length in the course of the run."""
    rows = []
    every = max(1, -(-len(history) // _LOSSES))
    for entry in history[::-1][::every][::-1]:
        parts = counts_of(entry).values()
        length = f"{total(parts).mean_accepted_length:.2f}" if parts else "-"
        rows.append((f"{entry['step']:,}", f"{entry['loss']:.3f}", length))
    return _table("| Step | Loss | Tokens per step |", "|---:|---:|---:|", rows)


def _acceptance_table(entry: dict[str, Any]) -> str:
    """A measurement by task and by position of the draft."""
    tasks = counts_of(entry)
    tasks["all"] = total(tasks.values())
    length = len(tasks["all"].reached)
    rows = []
    for name, counts in tasks.items():
        pairs = zip(counts.rates, counts.reached, strict=True)
        rates = [f"{rate:.2f} ({reached:,})" for rate, reached in pairs]
        rows.append((name, f"{counts.mean_accepted_length:.2f}", *rates))
    positions = "".join(f" position {j + 1} |" for j in range(length))
    return _table(f"| Task | Tokens per step |{positions}", "|---|---:|" + "---:|" * length, rows)


def _figures(trainer: Trainer) -> list[str]:
    """Losses and acceptance: paragraphs and tables."""
    last, config = trainer.history[-1] if trainer.history else {}, trainer.config
    return [
        "## Losses",
        _loss_table(trainer.history) if last else _NOTHING,
        "## Acceptance",
        f"On texts that the target wrote greedily, at most {config.held_out_tokens} tokens from "
        f"{config.held_out} openings of each validation file, with {trainer.measured_drafts}. "
        "Tokens per step count the target's own. A position's figure is the share accepted of the "
        "drafts that reached it (their number).",
        _acceptance_table(last) if last.get("acceptance") else _NOTHING,
    ]


def write_card(trainer: Trainer, command: str) -> Path:
    """Write the README.md beside the result of a finished run; returns its path.

    ``command`` is what the user typed. Files are named without their folders.
    """
    config = trainer.config
    excluded = ", ".join(config.exclude_licenses) or "nothing"
    parts = [
        "# Model card",
        trainer.about(),
        "## Data",
        _data_table(trainer.sources, config.exclude_licenses),
        f"Records left out when their licence contains: {excluded}.",
        "## Training",
        f"{trainer.step:,} steps of {config.batch_tokens:,} tokens:",
        f"```\n{command}\n```",
        *_figures(trainer),
    ]
    folder, text = trainer.out / trainer.result, "\n\n".join(parts) + "\n"
    replace_in(folder, {"README.md": text.encode("utf-8")}, "the model card")
    return folder / "README.md"
