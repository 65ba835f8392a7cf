"""The checkpoint of a training run: one file with checksums, which is replaced atomically."""

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

_KEYS = {"kind", "config", "optimizers", "step", "history"}


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
    """Replace a checkpoint atomically. Raises WriteError."""
    with atomic_write(file, "the checkpoint") as sink:
        torch.save(state, sink)


def read_state(file: Path) -> dict[str, Any] | None:
    """A checkpoint on the CPU; None if there is none. Raises ConfigError if it is damaged."""
    if not file.is_file():
        return None
    try:
        with ZipFile(file) as archive:
            damaged = archive.testzip()  # torch.load does not verify the checksums
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle may raise any exception
        damaged, state = "its content", None
    if damaged is None and isinstance(state, dict) and set(state) == _KEYS:
        return state
    raise ConfigError(f"{file} is damaged, or no checkpoint of a run; delete it to start again")
