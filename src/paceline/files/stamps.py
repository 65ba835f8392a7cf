"""What tells that a file is still the one that was read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileStamp:
    """A file as it was found: content that changes changes one of these."""

    path: str
    size: int
    changed: tuple[int, int, int]  # modification, change of status, inode

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        found = path.stat()
        return cls(
            str(path.resolve()), found.st_size, (found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        )
