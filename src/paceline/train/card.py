"""The model card: where the weights come from and how good they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.files import replace_text
from paceline.train.data import Source, read_records

if TYPE_CHECKING:
    from paceline.train.lm import LMTrainer


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


def _losses(trainer: LMTrainer) -> list[str]:
    measured = [entry for entry in trainer.history if entry["validation"]]
    if not measured:
        return ["No validation data was given."]
    rows = ["| Validation file | Nats per token |", "|---|---|"]
    rows += [f"| {name} | {loss:.3f} |" for name, loss in measured[-1]["validation"].items()]
    return rows


def write_card(trainer: LMTrainer, command: str) -> Path:
    """Write ``out/model/README.md`` for a finished run; returns its path.

    ``command`` is what the user typed. Files are named without their folders.
    """
    config = trainer.config
    origin = "the text of the files below"
    if config.teacher is not None:
        origin = (
            f"the probabilities of `{Path(config.teacher).name}` on the files below "
            f"(text loss share {config.text_weight:g})"
        )
    excluded = ", ".join(config.exclude_licenses) or "nothing"
    lines = [
        "# Model card",
        "",
        f"A Llama-architecture language model with {trainer.model.num_parameters():,} parameters: "
        f"{config.layers} layers x {config.hidden_size}, {config.heads} heads "
        f"({config.kv_heads} for keys and values), feed-forward {config.ffn_size}, "
        f"vocabulary {len(trainer.tokenizer)}, context {config.max_positions}. "
        f"Trained by Paceline from {origin}, in bf16 with float32 master weights.",
        "",
        "It is small: it shows and tests speculative decoding. Its statements are often wrong.",
        "",
        "## Data",
        "",
        *data_table(trainer.sources, config.exclude_licenses),
        "",
        f"Records left out when their licence contains: {excluded}.",
        "",
        "## Training",
        "",
        f"{trainer.step} steps of {config.batch_tokens:,} tokens:",
        "",
        "```",
        command,
        "```",
        "",
        "## Losses",
        "",
        *_losses(trainer),
        "",
    ]
    path = trainer.out / "model" / "README.md"
    replace_text(path, "\n".join(lines), "the model card")
    return path
