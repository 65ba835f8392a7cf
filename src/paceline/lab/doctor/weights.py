"""Whether the files are all there, and whether their numbers look like trained ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.lab.bench.prompts import evenly
from paceline.lab.doctor.findings import WARNING, Finding, finding
from paceline.lab.doctor.models import Model, ModelFiles, check_tensors

_MATRICES = 8  # sampled of each kind
_SAMPLE = 4096  # values of each: its standard deviation is then known to about 1 %
_CLOSE, _FAR = 0.05, 0.2  # to the spread of initialisation; of trained rows from it
_LOOKED_AT = 64  # rows


def check_files(files: ModelFiles) -> Iterator[Finding]:
    if files.gguf is not None:
        if files.gguf.splits_otherwise:
            yield finding("gguf-tokenizer-unsure", pre=files.gguf.pre_tokenizer)
        return
    if files.absent:
        names = ", ".join(files.absent[:3])
        yield finding("shards-absent", count=len(files.absent), names=names)
    yield from (finding("weights-damaged", text) for text in files.damaged)
    if files.remote:
        yield finding("weights-remote", name=files.name)
    elif files.pickled:
        yield finding("weights-pickled", file=files.pickled[0])
    elif not files.tensors and not files.absent and not files.damaged:
        yield finding("weights-absent", name=files.name)


def check_weights(model: Model) -> Iterator[Finding]:
    yield from check_tensors(model)
    yield from check_values(model.files)
    yield from _check_padding(model)
    yield from _check_tied(model)


def check_values(files: ModelFiles) -> Iterator[Finding]:
    """Values that no training leaves behind, in a sample of the tensors: norms of exactly one
    (Gemma: zero), and matrices with the standard deviation of the config (``initializer_range``),
    of that over sqrt(2 layers) (GPT-2), or of ``torch.nn.Linear``, 1 / sqrt(3 inputs)."""
    if files.remote:
        return
    floats = {
        key: tensor
        for key, tensor in files.tensors.items()
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
    }
    matrices = evenly([key for key, tensor in floats.items() if tensor.dim() == 2], _MATRICES)
    norms = evenly([key for key in floats if key.endswith("norm.weight")], _MATRICES)
    samples: dict[str, torch.Tensor] = {}
    for key in sorted({*matrices, *norms}):
        tensor = floats[key]
        count = min(_SAMPLE, tensor.numel())
        first = (tensor.numel() - count) // 2  # in the middle, where no padding row is
        samples[key] = tensor.view(-1)[first : first + count].float()
        if not bool(samples[key].isfinite().all()):
            yield finding("weights-not-finite", name=key)
            return
    spreads = {key: float(samples[key].std()) for key in matrices if bool(samples[key].any())}
    if not spreads:
        if matrices:
            text = f"all {len(matrices)} sampled matrices are zero"
            yield finding("weights-untrained", text)
        return
    initial_range = _initial_range(files)
    layers = int(files.config.get("num_hidden_layers") or files.config.get("n_layer") or 1)
    for key, spread in spreads.items():
        linear = (3 * floats[key].shape[1]) ** -0.5
        usual = (initial_range, initial_range / math.sqrt(2 * layers), linear)
        if min(abs(spread / one - 1) for one in usual) > _tolerance(samples[key]):
            return
    if all(set(samples[key].tolist()) in ({0.0}, {1.0}) for key in norms):
        ones = "norms are as they began, and " if norms else ""
        bounds = f"({min(spreads.values()):.3g} to {max(spreads.values()):.3g})"
        text = f"{ones}{len(spreads)} sampled matrices have the spread of fresh ones {bounds}"
        yield finding("weights-untrained", text)


def _initial_range(files: ModelFiles) -> float:
    return float(files.config.get("initializer_range") or 0.02)


def _tolerance(values: torch.Tensor) -> float:
    """Of few values the spread is not known well: three standard errors."""
    return max(_CLOSE, 3 / math.sqrt(2 * values.numel()))


def _check_padding(model: Model) -> Iterator[Finding]:
    """Rows of logits against the ids that the tokenizer knows."""
    if model.tokenizer is None:
        return
    known = model.tokenizer.get_vocab().values()
    top, rows = max(known, default=-1) + 1, model.vocab_size
    if top > rows:
        yield finding("vocabulary-overflows", last=top - 1, rows=rows)
    if top >= rows:
        return
    # Those of a draft are never drafted, whatever they hold.
    raw = untrained(model, range(top, rows), head=True) if model.about == "target" else None
    severity, raw = (WARNING, f", {raw}") if raw else (None, "")
    values: Any = {"rows": rows, "ids": top, "last": rows - 1, "raw": raw}
    yield finding("vocabulary-padded", severity=severity, **values)


def untrained(model: Model, rows: Sequence[int], head: bool = False) -> str | None:
    """What shows that no training has touched these rows, None if nothing does."""
    # Logits are made by the file's own head, else by the embedding that it is tied to.
    table = _table(model, "output") if head else None
    table = _table(model, "input") if table is None else table
    if table is None or not rows or max(rows) >= table.shape[0]:
        return None
    values = _rows(table, rows)
    if not bool(values.any()):
        logit = ", so their logits are 0 whatever the text" if head else ""
        return f"all zero{logit}"
    # Fresh ones have the spread of initialisation, and those of ordinary tokens have left it.
    initial_range = _initial_range(model.files)
    tokens = table.shape[0] if model.tokenizer is None else len(model.tokenizer)
    others = _rows(table, sorted(set(range(min(tokens, table.shape[0]))) - set(rows)))
    fresh, usual = float(values.std()), float(others.std())
    like_others, as_begun = abs(fresh / usual - 1), abs(fresh / initial_range - 1)
    if as_begun < _tolerance(values) < like_others and abs(usual / initial_range - 1) > _FAR:
        return f"with the spread of fresh ones ({fresh:.3g}, others {usual:.3g})"
    return None


def _check_tied(model: Model) -> Iterator[Finding]:
    if not model.files.whole:
        return
    head, embedding = (_table(model, end) for end in ("output", "input"))
    if head is None or embedding is None or head is embedding or head.shape != embedding.shape:
        return
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    rows = range(head.shape[0])
    if torch.equal(_rows(head, rows), _rows(embedding, rows)):
        yield finding("tied-head-repeated", numbers=head.numel(), tied=tied)
    elif tied:
        yield finding("tied-head-differs", numbers=head.numel())


def _table(model: Model, end: str) -> torch.Tensor | None:
    """The matrix of the embedding ("input") or the head, by the name that the architecture has for
    it; None if the files do not have it, or not its values."""
    if model.quantisation is not None or model.files.remote:
        return None
    part: Any = getattr(model.skeleton, f"get_{end}_embeddings")()
    names = [name for name, module in model.skeleton.named_modules() if module is part]
    tensor = model.files.tensors.get(f"{names[0]}.weight") if names else None
    return tensor if tensor is not None and tensor.dim() == 2 else None


def _rows(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """float32 ``[some, width]``: some of these rows, evenly over all."""
    return table[list(rows[:: max(1, len(rows) // _LOOKED_AT)][:_LOOKED_AT])].float()
