"""A disk that is full, planted at one system call after the other, or for real."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PLACES = ("open", "write", "flush", "fsync", "replace")


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Writes(io.BufferedWriter):
    """Takes half of what it is given."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        return int(no_space())


class _Flushes(io.BufferedWriter):
    """Finds out when it hands on what it took, as a file system that allocates late does."""

    def flush(self) -> None:
        no_space()


@contextmanager
def full_disk(place: str) -> Iterator[None]:
    """Every file that is written in the block fails at ``place``, one of ``PLACES``."""
    real = Path.open

    def planted(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" not in mode:
            return real(self, mode, *arguments, **options)
        if place == "open":
            no_space()
        kind = _Writes if place == "write" else _Flushes
        return kind(io.FileIO(self, "w"))

    with pytest.MonkeyPatch.context() as patch:
        if place in ("open", "write", "flush"):
            patch.setattr(Path, "open", planted)
        else:
            patch.setattr(os, place, no_space)
        yield


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond ``limit`` bytes: the kernel itself refuses, whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def content_of(folder: Path) -> dict[str, bytes]:
    """All that is in a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
