"""The model card of a training result: data, licences, command, losses, acceptance
(``card.md``)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from paceline.files import render_template, replace_in
from paceline.model.tokenizer import template_digest
from paceline.train.acceptance import AcceptanceCounts, total
from paceline.train.records import Records
from paceline.train.trainer import Trainer

_MAX_LOSS_ROWS = 12


def counts_of(entry: dict[str, Any]) -> dict[str, AcceptanceCounts]:
    """The held-out acceptance in one entry of a history, by file."""
    return msgspec.convert(entry["acceptance"], dict[str, AcceptanceCounts])


def write_card(trainer: Trainer, command: str) -> Path:
    """Write README.md into the folder of a finished run's result; returns its path. ``command`` is
    the user's command line. Data files are named without their folders."""
    config, history = trainer.config, trainer.history
    data = []  # each file with its number of records by licence
    for source in trainer.sources:
        records = Records(source.path, config.exclude_licenses)
        counts = Counter(str(record.get("license", "unknown")) for record in records)
        data.append((source, ", ".join(f"{name} {n:,}" for name, n in counts.most_common())))
    every = max(1, -(-len(history) // _MAX_LOSS_ROWS))
    losses = [(entry, total(counts_of(entry).values())) for entry in history[::-1][::every][::-1]]
    tasks = counts_of(history[-1]) if history else {}
    if tasks:
        tasks["all"] = total(tasks.values())
    digest = template_digest(trainer.tokenizer)
    tables = {"data": data, "losses": losses, "tasks": tasks, "form": digest}
    template = Path(__file__).with_name("card.md")
    text = render_template(template, trainer=trainer, config=config, command=command, **tables)
    replace_in(trainer.folder, {"README.md": text.encode("utf-8")}, "the model card")
    return trainer.folder / "README.md"
