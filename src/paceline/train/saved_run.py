"""What an interrupted run leaves behind: its state.

The state is one file. It is replaced as a whole, its predecessor stays beside it until the run has
ended, and every tensor in it carries a checksum: a run never goes on from something else than what
was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ConfigError
from paceline.files import telling, write_aside
from paceline.model.loading import weight_files
from paceline.model.tensorfile import digest, seal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SUMS = "sha256"
_NEEDED = {"config", "optimizer", "step", "history"}


def previous(file: Path) -> Path:
    """Where the state before the last one is: run/checkpoint.previous.pt."""
    return file.with_name(f"{file.stem}.previous{file.suffix}")


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Replace the state of a run; the old one becomes the previous one. Raises WriteError."""
    what = "the checkpoint"
    with telling(what, file):
        file.parent.mkdir(parents=True, exist_ok=True)
    for leftover in file.parent.glob(f".{file.name}.*"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    with write_aside(file, what, previous=previous(file)) as sink:
        torch.save({**state, _SUMS: _sums(state)}, sink)


def read_state(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The last state of a run that is whole, on the CPU, and a note if it is not the last one.

    None if there is none at all. Raises ConfigError, saying what is damaged, if none is whole.
    """
    reason = ""
    for place in (file, previous(file)):
        if not place.is_file():
            continue
        try:
            state = _read(place)
        except _DamagedError as damage:
            reason = reason or f"{place} is damaged ({damage})"
            continue
        note = f"{reason or f'there is no {file}'}; going on from {place.name}, the one before it"
        return state, note if place != file else ""
    if reason:
        raise ConfigError(f"{reason}; delete it to start anew")
    return None, ""


class _DamagedError(Exception):
    pass


def _read(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # flipped bits in a pickle may raise anything
        raise _DamagedError("it cannot be read") from None
    if not isinstance(state, dict) or not _NEEDED <= set(state) <= _NEEDED | {"kind", _SUMS}:
        raise _DamagedError("it is not the state of a run")
    sums = state.pop(_SUMS, None)
    if sums is None:  # of an earlier version
        return state
    if not isinstance(sums, dict):
        raise _DamagedError("its checksums are none")
    found = _sums(state)
    for key in sorted(found.keys() | sums.keys()):
        if found.get(key) != sums.get(key):
            whose = f"tensor {key} does" if key else "options and history do"
            raise _DamagedError(f"{whose} not match the checksum")
    return state


def _sums(state: dict[str, Any]) -> dict[str, str]:
    """Of every tensor by its place, as in optimizer.masters.3; under "" that of all the rest."""
    sums = {}
    for key, tensor in _tensors(state, ""):
        sums[key] = digest(tensor)
    rest = json.dumps(state, sort_keys=True, default=lambda value: type(value).__name__)
    return {**sums, "": hashlib.sha256(rest.encode()).hexdigest()}


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{place}.{key}" if place else str(key))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model and its tokenizer as transformers does; the weights get checksums."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in weight_files(folder):
        seal(file)
