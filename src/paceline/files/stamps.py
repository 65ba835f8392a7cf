"""Whether a file is still the one that was read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileStamp:
    """A file's state: a change of its content changes one of these."""

    path: str
    size: int
    changed: tuple[int, int, int]  # modification, change of status, inode

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        status = path.stat()
        changed = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return cls(str(path.resolve()), status.st_size, changed)
