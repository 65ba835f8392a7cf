"""Whether the files are all there, and whether their numbers look like trained ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ModelLoadError
from paceline.model.gguf import GgufFile
from paceline.model.tensorfile import verify
from paceline.tools.doctor.files import ModelFiles, TensorEntry
from paceline.tools.doctor.findings import Finding, finding

_MATRICES = 8  # sampled of each kind
_SAMPLE = 4096  # values of each: its standard deviation is then known to about 1 %
_CLOSE = 0.05


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
    """What transformers does not take from it."""
    if file.splits_otherwise:
        text = f"the file splits text as {file.pre_tokenizer!r} does, which is not known here"
        yield finding("gguf-tokenizer-unsure", about, text)
    if file.rope_factors:
        yield finding("gguf-rope-factors", about, "rope_freqs.weight is among the tensors")


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
    matrices = _spread([key for key, entry in floats.items() if len(entry.shape) == 2])
    vectors = _spread([key for key in floats if key.endswith("norm.weight")])
    samples = {key: _sample(floats[key]) for key in {*matrices, *vectors}}
    broken = sorted(key for key, values in samples.items() if not bool(values.isfinite().all()))
    if broken:
        yield finding("weights-not-finite", about, f"{broken[0]} holds NaN or infinity")
        return
    sampled = {key: (samples[key], floats[key].shape) for key in matrices}
    reason = _untrained(sampled, [samples[key] for key in vectors], files.config)
    if reason is not None:
        yield finding("weights-untrained", about, reason)


def _spread(names: Sequence[str]) -> list[str]:
    """Up to ``_MATRICES`` of them, evenly over all."""
    count = min(_MATRICES, len(names))
    return [names[i * len(names) // count] for i in range(count)]


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
    said = float(config.get("initializer_range") or 0.02)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    fresh = []
    for key, (values, shape) in matrices.items():
        spread = float(values.std())
        usual = (said, said / math.sqrt(2 * layers), 1 / math.sqrt(3 * shape[1]))
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
