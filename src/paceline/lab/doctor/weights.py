"""Whether the files are all there, and whether their numbers look like trained ones: of matrices,
and of single rows of the embedding and the head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ModelLoadError
from paceline.lab.bench.prompts import evenly
from paceline.lab.doctor.files import ModelFiles, TensorEntry
from paceline.lab.doctor.findings import WARNING, Finding, finding
from paceline.lab.doctor.models import Model
from paceline.model.gguf import GgufFile
from paceline.model.tensorfile import verify

_MATRICES = 8  # sampled of each kind
_SAMPLE = 4096  # values of each: its standard deviation is then known to about 1 %
_CLOSE, _FAR = 0.05, 0.2  # to the spread of initialisation; of trained rows from it
_LOOKED_AT = 64  # rows


def check_files(files: ModelFiles, about: str) -> Iterator[Finding]:
    """Files that are absent, damaged, pickled, or still on the hub."""
    if files.gguf is not None:
        yield from _gguf(files.gguf, about)
        return
    if files.absent:
        text = f"the index names {len(files.absent)} absent files: {', '.join(files.absent[:3])}"
        yield finding("shards-absent", about, text)
    for text in [*files.damaged, *_flipped(files)]:
        yield finding("weights-damaged", about, text)
    if files.remote:
        text = f"{files.name} is not downloaded; its small files and headers were looked at"
        yield finding("weights-remote", about, text)
    elif files.pickled:
        yield finding("weights-pickled", about, f"weights in {files.pickled[0]}")
    elif not files.tensors and not files.absent and not files.damaged:
        text = f"folder {files.name} has a config.json but no weights"
        yield finding("weights-absent", about, text)


def _gguf(file: GgufFile, about: str) -> Iterator[Finding]:
    """How it splits text, where nobody here knows the way."""
    if file.splits_otherwise:
        text = f"the file splits text as {file.pre_tokenizer!r} does, which is not known here"
        yield finding("gguf-tokenizer-unsure", about, text)


def _flipped(files: ModelFiles) -> list[str]:
    """A file that carries checksums and is not what was saved. Reads these whole, others not."""
    for file in sorted({entry.file for entry in files.tensors.values() if entry.file is not None}):
        try:
            verify(file)
        except ModelLoadError as error:
            return [str(error).partition("; ")[0]]
    return []


def check_values(files: ModelFiles, about: str) -> Iterator[Finding]:
    """Values that no training leaves behind, in a sample of the tensors."""
    floats = {
        key: entry
        for key, entry in files.tensors.items()
        if entry.dtype in ("F64", "F32", "F16", "BF16") and entry.file is not None and entry.count
    }
    matrices = evenly([k for k, entry in floats.items() if len(entry.shape) == 2], _MATRICES)
    vectors = evenly([key for key in floats if key.endswith("norm.weight")], _MATRICES)
    samples = {key: _sample(floats[key]) for key in {*matrices, *vectors}}
    broken = sorted(key for key, values in samples.items() if not bool(values.isfinite().all()))
    if broken:
        yield finding("weights-not-finite", about, f"{broken[0]} holds NaN or infinity")
        return
    sampled = {key: (samples[key], floats[key].shape) for key in matrices}
    reason = _untrained(sampled, [samples[key] for key in vectors], files.config)
    if reason is not None:
        yield finding("weights-untrained", about, reason)


def _sample(entry: TensorEntry) -> torch.Tensor:
    """float32: values out of the tensor's middle, where no padding row is."""
    count = min(_SAMPLE, entry.count)
    values = entry.read((entry.count - count) // 2, count)
    assert values is not None
    return values.float()


def _untrained(
    matrices: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]],
    norms: Sequence[torch.Tensor],
    config: Mapping[str, Any],
) -> str | None:
    """Why they look untrained, or None.

    Initialisation leaves norms at exactly one (Gemma: zero), and matrices with the standard
    deviation of the config (``initializer_range``), of that over sqrt(2 layers) where outputs are
    added up (GPT-2), or of ``torch.nn.Linear``, 1 / sqrt(3 inputs).
    """
    if not matrices:
        return None
    zero = [key for key, (values, _) in matrices.items() if not bool(values.any())]
    if len(zero) == len(matrices):
        return f"all {len(zero)} sampled matrices are zero"
    if not all(bool((values == 1).all() or (values == 0).all()) for values in norms):
        return None
    initial_range = float(config.get("initializer_range") or 0.02)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    fresh = []
    for key, (values, shape) in matrices.items():
        spread = float(values.std())
        usual = (initial_range, initial_range / math.sqrt(2 * layers), 1 / math.sqrt(3 * shape[1]))
        # Of few values the spread is not known well: three standard errors.
        close = max(_CLOSE, 3 / math.sqrt(2 * values.numel()))
        if key not in zero and min(abs(spread / one - 1) for one in usual) > close:
            return None
        fresh.append(spread)
    ones = "norms are as they began, and " if norms else ""
    return (
        f"{ones}{len(fresh)} sampled matrices have the spread of fresh ones "
        f"({min(fresh):.3g} to {max(fresh):.3g})"
    )


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
    output_entry = _entry(model, "get_output_embeddings") if head else None
    entry = output_entry or _entry(model, "get_input_embeddings")
    if entry is None or len(entry.shape) != 2 or not rows or max(rows) >= entry.shape[0]:
        return None
    values = _rows(entry, rows)
    if values is None:
        return None
    if not bool(values.any()):
        logit = ", so their logits are 0 whatever the text" if head else ""
        return f"all zero{logit}"
    # Fresh ones have the spread of initialisation, and those of ordinary tokens have left it.
    initial_range = float(model.files.config.get("initializer_range") or 0.02)
    tokens = entry.shape[0] if model.tokenizer is None else len(model.tokenizer)
    others = _rows(entry, sorted(set(range(min(tokens, entry.shape[0]))) - set(rows)))
    if others is None:
        return None
    fresh, usual = float(values.std()), float(others.std())
    near = max(_CLOSE, 3 / math.sqrt(2 * values.numel()))  # of few values it is not known well
    if (
        abs(fresh / initial_range - 1) < near < abs(fresh / usual - 1)
        and abs(usual / initial_range - 1) > _FAR
    ):
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
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    size = f"{head.count:,} numbers"
    if torch.equal(ours, theirs):
        text = f"the head repeats the embedding ({size}), config.json says tied: {tied}"
        yield finding("tied-head-repeated", model.about, text)
    elif tied:
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
    read_rows = [entry.read(row * width, width) for row in rows[::step][:_LOOKED_AT]]
    kept = [values.float() for values in read_rows if values is not None]
    return torch.stack(kept) if kept else None
