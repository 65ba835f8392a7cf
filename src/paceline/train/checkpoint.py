"""The state of an interrupted run: one file, replaced as a whole, with a checksum of every record.

Its predecessor stays beside it until the run has ended.
"""

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
    """Where the state before the last one is: run/checkpoint.previous.pt."""
    return file.with_name(f"{file.stem}.previous{file.suffix}")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises ConfigError if another run holds the folder of a run, WriteError."""
    file = folder / ".lock"
    with write_errors("the run", folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(file).acquire(timeout=0)
        except Timeout:
            line = f"another training runs in {folder}; wait for its end, or use another --out"
            raise ConfigError(line) from None
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Replace the state of a run; the old one becomes the previous one. Raises WriteError."""
    what = "the checkpoint"
    with write_errors(what, file):
        file.parent.mkdir(parents=True, exist_ok=True)
    clear_killed(file)
    with atomic_write(file, what, None, previous=previous(file)) as sink:
        torch.save(state, sink)


def read_state(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The last state that is whole, on the CPU (None: there is none), and a note if it is not the
    last one. Raises ConfigError, saying what is damaged, if none is whole."""
    damage = ""
    for path in (file, previous(file)):
        if path.is_file():
            state, reason = _read(path)
            if state is not None:
                missing = damage or f"there is no {file}"
                note = f"{missing}; going on from {path.name}, the one before it"
                return state, note if path != file else ""
            damage = damage or f"{path} is damaged ({reason})"
    if damage:
        raise ConfigError(f"{damage}; delete it to start anew")
    return None, ""


def _read(file: Path) -> tuple[dict[str, Any] | None, str]:
    """A state, or why the file holds none."""
    try:
        with ZipFile(file) as archive:
            record = archive.testzip()  # torch.load does not look at the checksums
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # flipped bits in a pickle may raise anything
        return None, "it cannot be read"
    if record is not None:
        return None, f"{record} does not match its checksum"
    if not isinstance(state, dict) or set(state) != _KEYS:
        return None, "it is not the state of a run"
    return state, ""
