"""Atomic writing of files and folders: they are written completely or not at all.

A new file is written beside the old one, synchronised to the disk and renamed over it; the old one
therefore survives a full disk, a crash or a power failure. A place that a user names is checked
before the work (``check_new``): what exists there is replaced only with ``--force``."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from paceline.errors import ConfigError, PacelineError, WriteError

# How libraries written in Rust (safetensors, tokenizers) end the text of a failed write.
_RUST = re.compile(r"\(os error (\d+)\)")


def user_path(path: str | Path) -> Path:
    """The path with ``~`` replaced by a home folder; as it is if there is no such user."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """``$PACELINE_CACHE``, else ``$XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    folder = os.environ.get("PACELINE_CACHE")
    if folder:
        return user_path(folder).absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "paceline"


@dataclass(frozen=True)
class FileStamp:
    """The state of a file. Whatever changes the file's content changes one of these fields."""

    path: str
    size: int
    changed: tuple[int, int, int]  # modification time, status change time, inode

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        status = path.stat()
        changed = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return cls(str(path.resolve()), status.st_size, changed)


def read_toml(path: str | Path, what: str, advice: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, whose message ends with ``advice``."""
    tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    end = advice and f"; {advice}"
    try:
        table: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}{end}") from None
    except (ValueError, RecursionError) as error:  # also numbers of more than 4,300 digits
        raise ConfigError(f"{what} {path} is not valid TOML: {error}{end}") from None
    return table


def json_object(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file; empty if the file cannot be read or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def render_template(template: Path, **values: Any) -> str:
    """Render a Jinja template of this package. In HTML templates the values are escaped."""
    from jinja2 import Environment

    environment = Environment(
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


# -- writing ---------------------------------------------------------------------------------------


def check_new(path: str | Path, what: str, force: bool = False, folder: bool = False) -> None:
    """Raise WriteError if there is a file, or a folder that is not empty, and not ``force``, or if
    nothing can be written there. Called before long work whose result goes there. ``folder``: the
    result is one. Parent folders may be missing; pipes and devices pass."""
    path = Path(path)
    with write_errors(what, path):
        if _is_pipe_or_device(path):
            return
        TemporaryFile(dir=next((p for p in path.absolute().parents if p.exists()), path)).close()
        if folder and path.resolve() in (here := Path.cwd().resolve(), *here.parents):
            raise WriteError(
                f"cannot write {what} {path}: it would replace the current folder; name one inside"
            )
        if path.exists() and path.is_dir() != folder:
            kind = "file" if folder else "folder"
            raise WriteError(f"cannot write {what} {path}: it is a {kind}; choose another name")
        if not force and (any(path.iterdir()) if path.is_dir() else path.exists()):
            raise WriteError(
                f"cannot write {what} {path}: it exists already; choose another name, or give "
                "--force to replace it"
            )


@contextmanager
def atomic_write(path: str | Path, what: str, durable: bool = True) -> Iterator[IO[bytes]]:
    """Write ``path`` in the block; the file is replaced as a whole if the block ends without error.
    ``what`` names the file in messages, as in "the report". ``durable`` False: no fsync, for files
    that can be made again. Parent folders are made. Raises WriteError."""
    with _replacing(path, what, durable) as new, new.open("wb") as sink:
        yield sink


def write_files(contents: Mapping[Path, bytes], what: str) -> None:
    """Write several files; none is renamed before all contents are written. Raises WriteError."""
    with ExitStack() as stack:
        for path, content in contents.items():
            sink = stack.enter_context(atomic_write(path, what))
            sink.write(content)
            sink.flush()


@contextmanager
def atomic_folder(path: str | Path, what: str) -> Iterator[Path]:
    """A new folder to fill, which replaces ``path`` if the block ends without error. Raises
    WriteError."""
    with _replacing(path, what) as new:
        new.mkdir()
        yield new


@contextmanager
def _replacing(path: str | Path, what: str, durable: bool = True) -> Iterator[Path]:
    """The path of a new file or folder, which is renamed to ``path`` at the end of the block."""
    real = Path(os.path.realpath(path))  # a link stays a link
    with write_errors(what, path):
        if _is_pipe_or_device(Path(path)):
            yield Path(path)  # the real path of /dev/stdout may be no file
            return
        real.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"dir": real.parent, "ignore_cleanup_errors": True}
        with TemporaryDirectory(prefix=".paceline-", **options) as folder:
            new, old = Path(folder, "new"), Path(folder, "old")
            yield new
            for file in [new, *new.rglob("*")] if durable else ():
                if file.is_file():
                    with file.open("r+b") as stream:
                        os.fsync(stream.fileno())
            if real.is_file():
                shutil.copymode(real, new)
            elif real.exists() and new.is_dir():
                os.replace(real, old)
            try:
                os.replace(new, real)
            except OSError:
                if old.exists():
                    os.replace(old, real)
                raise


def _is_pipe_or_device(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def write_errors(what: str, path: str | Path, more: str = "") -> Iterator[None]:
    """Turn errors of writing in the block into a WriteError, whose message ends with ``more``."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        failed, raised = _RUST.search(str(error)), error.__context__
        if isinstance(error, RuntimeError) and isinstance(raised, OSError):
            error = raised  # torch.save raises a RuntimeError after it
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif failed is not None:
            reason = os.strerror(int(failed[1]))
        else:
            raise
        advice = f"make room there or choose another place{more}"
        raise WriteError(f"cannot write {what} {path}: {reason}; {advice}") from None


class LongRecord:
    """A text file whose lines are added over hours. Until it is complete, the lines are in
    ``path.partial``, and ``key``, which identifies the work, in ``path.partial.key``. If the block
    ends early, complete lines stay, and a later block with the same key continues after them.
    Raises ConfigError if the lines belong to another key, WriteError if ``path`` exists."""

    def __init__(self, path: Path, what: str, key: str) -> None:
        self._path, self._what, self._key = path, what, key
        self.partial = path.with_name(f"{path.name}.partial")
        self._key_file = path.with_name(f"{path.name}.partial.key")

    def __enter__(self) -> LongRecord:
        with write_errors(self._what, self._path):
            if self._path.exists():  # also a device, which a file must not replace
                raise WriteError(
                    f"cannot write {self._what} {self._path}: it exists already; name another"
                )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stored = self._key_file.read_text("utf-8") if self._key_file.is_file() else ""
            size = self.partial.stat().st_size if self.partial.exists() else 0
            if size and stored != self._key:
                raise ConfigError(
                    f"{self.partial} holds records of a command with other options; run that one "
                    "to go on with it, delete the file, or choose another place"
                )
            if stored != self._key:  # a full disk must not cost the key of records that are there
                self._key_file.write_text(self._key, "utf-8")
            self._file = self.partial.open("ab", buffering=0)
            sizes = [len(line.encode("utf-8")) for line in self.kept()]
            self._file.truncate(sum(sizes))
        self.lines = len(sizes)
        return self

    def kept(self) -> Iterator[str]:
        """The complete lines so far; a cut last line is left out."""
        with self.partial.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line.decode("utf-8")

    def add(self, line: str) -> None:
        """Append a line. Raises WriteError."""
        content = memoryview(line.encode("utf-8") + b"\n")
        with write_errors(self._what, self._path, self._left):
            while content:
                content = content[self._file.write(content) :]
        self.lines += 1

    @property
    def _left(self) -> str:
        return f"; the {self.lines} records until then are in {self.partial}" if self.lines else ""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                with write_errors(self._what, self._path, self._left):
                    os.fsync(self._file.fileno())  # hours of work survive a power failure
                    os.replace(self.partial, self._path)
        if kind is None:
            self._key_file.unlink()
        elif not self.lines:  # nothing to go on with
            for file in (self.partial, self._key_file):
                file.unlink(missing_ok=True)
        elif issubclass(kind, KeyboardInterrupt):
            raise KeyboardInterrupt(
                f"interrupted{self._left}: run the same command again to go on"
            ) from None
