"""Rows of the embedding and of the head: never trained, padding, or the same in both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.tools.doctor.files import TensorEntry
from paceline.tools.doctor.findings import Finding, finding
from paceline.tools.doctor.kinds import WARNING
from paceline.tools.doctor.models import Model

_LOOKED_AT = 64  # rows
_CLOSE, _FAR = 0.05, 0.2  # to the spread of initialisation; of trained rows from it


def check_padding(model: Model) -> Iterator[Finding]:
    """Rows of logits against the ids that the tokenizer knows."""
    if model.tokenizer is None:
        return
    known = model.tokenizer.get_vocab().values()
    top, rows = max(known, default=-1) + 1, model.vocab_size
    if top > rows:
        text = f"the tokenizer has ids up to {top - 1}, but the model {rows:,} rows of logits"
        yield finding("vocabulary-overflows", model.about, text)
    if top >= rows:
        return
    text = f"logits have {rows:,} rows for {top:,} ids: rows {top} to {rows - 1} are padding"
    # Those of a draft are never drafted, whatever they hold.
    raw = untrained(model, range(top, rows), head=True) if model.about == "target" else None
    if raw is None:
        yield finding("vocabulary-padded", model.about, text)
    else:
        yield finding("vocabulary-padded", model.about, f"{text}, {raw}", WARNING)


def untrained(model: Model, rows: Sequence[int], head: bool = False) -> str | None:
    """What shows that no training has touched these rows, None if nothing does."""
    # Logits are made by the file's own head, else by the embedding that it is tied to.
    own = _entry(model, "get_output_embeddings") if head else None
    entry = own or _entry(model, "get_input_embeddings")
    if entry is None or len(entry.shape) != 2 or not rows or max(rows) >= entry.shape[0]:
        return None
    values = _rows(entry, rows)
    if values is None:
        return None
    if not bool(values.any()):
        logit = ", so their logits are 0 whatever the text" if head else ""
        return f"all zero{logit}"
    # Fresh ones have the spread of initialisation, and those of ordinary tokens have left it.
    said = float(model.files.config.get("initializer_range") or 0.02)
    tokens = entry.shape[0] if model.tokenizer is None else len(model.tokenizer)
    others = _rows(entry, sorted(set(range(min(tokens, entry.shape[0]))) - set(rows)))
    if others is None:
        return None
    fresh, usual = float(values.std()), float(others.std())
    near = max(_CLOSE, 3 / math.sqrt(2 * values.numel()))  # of few values it is not known well
    if abs(fresh / said - 1) < near < abs(fresh / usual - 1) and abs(usual / said - 1) > _FAR:
        return f"with the spread of fresh ones ({fresh:.3g}, others {usual:.3g})"
    return None


def check_tied(model: Model) -> Iterator[Finding]:
    """Whether config.json and the file agree on a head of its own."""
    if not model.files.whole:
        return
    head, embedding = (_entry(model, f"get_{end}_embeddings") for end in ("output", "input"))
    if head is None or embedding is None or head is embedding:
        return
    if head.shape != embedding.shape or len(head.shape) != 2:
        return
    rows = range(0, head.shape[0], max(1, head.shape[0] // _LOOKED_AT))
    ours, theirs = _rows(head, rows), _rows(embedding, rows)
    if ours is None or theirs is None:
        return
    said = bool(getattr(model.config, "tie_word_embeddings", False))
    size = f"{head.count:,} numbers"
    if torch.equal(ours, theirs):
        text = f"the head repeats the embedding ({size}), config.json says tied: {said}"
        yield finding("tied-head-repeated", model.about, text)
    elif said:
        text = f"config.json ties the head to the embedding, but the file has another head ({size})"
        yield finding("tied-head-differs", model.about, text)


def _entry(model: Model, getter: str) -> TensorEntry | None:
    """The tensor of the file by the name that the architecture has for it."""
    if model.quantisation is not None:
        return None
    part: Any = getattr(model.skeleton, getter)()
    names = [name for name, module in model.skeleton.named_modules() if module is part]
    return model.files.tensors.get(f"{names[0]}.weight") if names else None


def _rows(entry: TensorEntry, rows: Sequence[int]) -> torch.Tensor | None:
    """float32 ``[some, width]``: some of these rows, evenly over all."""
    step = max(1, len(rows) // _LOOKED_AT)
    width = entry.shape[1]
    found = [entry.read(row * width, width) for row in rows[::step][:_LOOKED_AT]]
    kept = [values.float() for values in found if values is not None]
    return torch.stack(kept) if kept else None
