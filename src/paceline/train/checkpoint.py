"""Checkpoints of a training run: one file with checksums, which is replaced atomically.

The previous checkpoint is kept as well until the run has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from filelock import FileLock, Timeout

from paceline.errors import ConfigError
from paceline.files import atomic_write, write_errors
from paceline.files.ownership import clear_killed

_KEYS = {"kind", "config", "optimizers", "step", "history"}


def previous(file: Path) -> Path:
    """The path of the previous checkpoint: run/checkpoint.previous.pt."""
    return file.with_name(f"{file.stem}.previous{file.suffix}")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder of a run. Raises ConfigError if another process has it, WriteError."""
    file = folder / ".lock"
    with write_errors("the run", folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(file).acquire(timeout=0)
        except Timeout:
            line = f"another training is running in {folder}; wait for it, or use another --out"
            raise ConfigError(line) from None
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; the old one becomes the previous one. Raises WriteError."""
    what = "the checkpoint"
    with write_errors(what, file):
        file.parent.mkdir(parents=True, exist_ok=True)
    clear_killed(file)
    with atomic_write(file, what, None, previous=previous(file)) as sink:
        torch.save(state, sink)


def read_state(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The last undamaged checkpoint on the CPU, or None if there are no files; and a note if it is
    the previous one. Raises ConfigError if all files are damaged."""
    damage = ""
    for path in (file, previous(file)):
        if path.is_file():
            state, reason = _read(path)
            if state is not None:
                missing = damage or f"there is no {file}"
                note = f"{missing}; continuing from the previous checkpoint {path.name}"
                return state, note if path != file else ""
            damage = damage or f"{path} is damaged ({reason})"
    if damage:
        raise ConfigError(f"{damage}; delete it to start from the beginning")
    return None, ""


def _read(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The state in a file, or why it has none."""
    try:
        with ZipFile(file) as archive:
            record = archive.testzip()  # torch.load does not verify the checksums
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle may raise any exception
        return None, "it cannot be read"
    if record is not None:
        return None, f"{record} does not match its checksum"
    if not isinstance(state, dict) or set(state) != _KEYS:
        return None, "it is not a checkpoint of a run"
    return state, ""
