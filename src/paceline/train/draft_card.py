"""The model card of a distilled draft: for which target, from what, and how often it is right."""

from __future__ import annotations

from pathlib import Path

from paceline.train.draft import DraftTrainer
from paceline.train.head_card import run_sections, write_card
from paceline.train.lm import run_name

_LOSS = {
    "kl": "the KL divergence from the target's probabilities",
    "tv": "total variation from the target's probabilities",
    "mixed": "KL divergence and total variation from the target's probabilities",
}


def write_draft_card(trainer: DraftTrainer, command: str) -> Path:
    """Write ``out/model/README.md`` for a finished run; returns its path.

    ``command`` is what the user typed. Files are named without their folders.
    """
    config = trainer.config
    assert config.teacher is not None
    start = "new weights" if config.init is None else f"the weights of `{run_name(config.init)}`"
    shares = [
        f"{share:g} of the loss against {what}"
        for share, what in (
            (config.argmax_weight, "the target's likeliest token"),
            (config.text_weight, "the text itself"),
        )
        if share
    ]
    lines = [
        "# Model card",
        "",
        f"A draft model for `{run_name(config.teacher)}`: "
        f"{type(trainer.model).__name__} with {trainer.model.num_parameters():,} parameters, "
        f"trained by Paceline from {start} on {', '.join([_LOSS[config.loss], *shares])}, in bf16 "
        "with float32 master weights. It speaks the target's vocabulary: "
        "`paceline generate --model TARGET --draft FOLDER`.",
        "",
        *run_sections(trainer, f"drafts of {config.draft_length} tokens", command),
    ]
    return write_card(trainer.out / "model", lines)
