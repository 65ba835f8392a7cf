"""Atomic writing of files and folders: they are written completely or not at all.

A new file is written under another name in the same folder, synchronised to the disk and renamed
over the old one, which therefore survives a full disk, a crash or a power failure. Only files that
Paceline wrote are replaced (ownership.py)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from paceline.errors import ConfigError, PacelineError, WriteError
from paceline.files import ownership
from paceline.files.ownership import Proof

_ADVICE = (
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, "make room there or choose another place"),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, "choose a place that may be written to"),
    ({errno.ENOENT}, "create the folder first"),
    ({errno.ENOTDIR}, "a part of its path is a file: choose another place"),
)
_ELSEWHERE = "choose another place"
_KEY = "Records of Paceline with the options\n"  # the first line of a key file
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


@contextmanager
def atomic_write(
    path: str | Path,
    what: str,
    proof: Proof | None,
    durable: bool = True,
    previous: Path | None = None,
) -> Iterator[IO[bytes]]:
    """Write ``path`` in the block; the file is replaced as a whole if the block ends without error.
    ``what`` names the file in messages, as in "the report". ``proof`` says whether Paceline wrote
    an existing file, and only then it is replaced; None replaces any file. ``durable`` False: no
    fsync, for files that can be made again. ``previous``: where to move the old file, if ``proof``
    accepts a file there. Raises WriteError."""
    ownership.check_file(path, what, proof)
    if previous is not None:
        ownership.check_file(previous, what, proof)
    aside = _Aside(Path(path))
    with write_errors(what, path), aside:
        with aside.open(durable) as sink:
            yield sink
        aside.put(keep=previous)


@contextmanager
def write_cached(file: Path, folder: Path, what: str) -> Iterator[IO[bytes]]:
    """Write a file that can be made again, in a cache folder; see ``atomic_write``."""
    with write_errors(what, file):
        ownership.claim(folder)
        file.parent.mkdir(exist_ok=True)
    with atomic_write(file, what, lambda path: ownership.is_claimed(folder), durable=False) as sink:
        yield sink


def replace_files(contents: Mapping[Path, bytes], what: str, proof: Proof | None) -> None:
    """Write several files, all or none. Arguments and errors as of ``atomic_write``."""
    for path in contents:
        ownership.check_file(path, what, proof)
    with ExitStack() as stack:
        asides = [stack.enter_context(_Aside(path)) for path in contents]
        for aside, (path, content) in zip(asides, contents.items(), strict=True):
            with write_errors(what, path), aside.open(True) as sink:
                sink.write(content)
        # All contents are on the disk now. If a rename fails, the earlier ones are undone.
        undo = stack.enter_context(ExitStack())
        for aside in asides:
            with write_errors(what, aside.path):
                aside.put(keep=aside.old if len(asides) > 1 else None)
            undo.callback(aside.take_back)
        undo.pop_all()


def replace_text(path: str | Path, text: str, what: str, proof: Proof | None) -> None:
    """``replace_files`` for one text file."""
    replace_files({Path(path): text.encode("utf-8")}, what, proof)


def replace_in(
    folder: Path, contents: Mapping[str, bytes], what: str, damaged: bool = False
) -> None:
    """Write files into a folder, all or none, and list them in its manifest. Raises WriteError,
    also if an old file does not match the manifest; ``damaged`` as in ``check_folder``."""
    with write_errors(what, folder):
        folder.mkdir(parents=True, exist_ok=True)
    ownership.check_names(folder, list(contents), what, damaged)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    listed = ownership.manifest_text({**ownership.read_manifest(folder), **digests})
    files = {folder / name: content for name, content in contents.items()}
    replace_files({**files, folder / ownership.MANIFEST: listed.encode("utf-8")}, what, None)


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


@contextmanager
def atomic_folder(path: str | Path, what: str, damaged: bool = False) -> Iterator[Path]:
    """A new folder to fill, which becomes ``path`` if the block ends without error. It replaces a
    folder that matches its manifest; ``damaged`` as in ``check_folder``. Raises WriteError."""
    aside = _Aside(path)
    ownership.clear_killed(aside.path)
    ownership.check_folder(path, what, damaged)
    with write_errors(what, path), aside:
        aside.partial.mkdir(parents=True)
        yield aside.partial
        ownership.write_manifest(aside.partial)
        for file in aside.partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        ownership.check_folder(path, what, damaged)  # the block may have taken hours
        aside.put(keep=aside.old)


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
            cause, reason = error.errno, error.strerror or str(error)
        elif failed is not None:
            cause, reason = int(failed[1]), os.strerror(int(failed[1]))
        else:
            raise
        advice = next((words for numbers, words in _ADVICE if cause in numbers), _ELSEWHERE)
        if Path(path).exists():
            advice += ", what was there before is unchanged"
        raise WriteError(f"cannot write {what} {path}: {reason}; {advice}{more}") from None


def check_writable(path: str | Path, what: str, proof: Proof | None = None) -> None:
    """Raise WriteError if a file (with ``proof``) or folder (without) cannot be written or may not
    be replaced. Called before long work whose result goes there. Parent folders may be missing."""
    path, shown = Path(path).absolute(), path
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe or a device
        return
    if proof is None:
        ownership.check_folder(shown, what)
    else:
        ownership.check_file(shown, what, proof)
    with write_errors(what, shown), TemporaryFile(dir=next(p for p in path.parents if p.exists())):
        pass


class LongRecord:
    """A text file whose lines are added over hours. Until it is complete, the lines are in
    ``path.partial``, and ``key``, which identifies the work, in ``path.partial.key``. If the block
    ends early, complete lines stay, and a later block with the same key continues after them.
    Raises ConfigError if the lines belong to another key, WriteError if ``path`` exists."""

    def __init__(self, path: Path, what: str, key: str) -> None:
        self._path, self._what, self._key = path, what, _KEY + key
        self.partial = path.with_name(f"{path.name}.partial")
        self._key_file = path.with_name(f"{path.name}.partial.key")

    def __enter__(self) -> LongRecord:
        ownership.check_file(self._path, self._what, lambda _: False)
        with write_errors(self._what, self._path):
            size = self.partial.stat().st_size if self.partial.exists() else 0
            stored = self._key_file.read_text("utf-8") if self._key_file.is_file() else ""
            if size and stored != self._key:
                raise ConfigError(
                    f"{self.partial} holds records of a command with other options; run that one "
                    "to go on with it, delete the file, or choose another place"
                )
            replace_text(
                *(self._key_file, self._key, "the key of the records"),
                proof=lambda file: file.read_text("utf-8").startswith(_KEY),
            )
            self._file = self.partial.open("ab", buffering=0)
            sizes = [len(line.encode("utf-8")) for line in self.kept()]
            self.lines, self._whole = len(sizes), sum(sizes)
            self._file.truncate(self._whole)
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
        self._whole = self._file.tell()

    @property
    def _left(self) -> str:
        return f"; the {self.lines} records until then are in {self.partial}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                # Another process may have made the file since the block began.
                ownership.check_file(self._path, self._what, lambda _: False)
                with write_errors(self._what, self._path, self._left):
                    os.fsync(self._file.fileno())
                    os.replace(self.partial, self._path)
                self._key_file.unlink(missing_ok=True)
                return
            with suppress(OSError):
                self._file.truncate(self._whole)
        if issubclass(kind, KeyboardInterrupt):
            raise KeyboardInterrupt(
                f"interrupted{self._left}: run the same command again to go on"
            ) from None


class _Aside:
    """A new file or folder ``partial``, which ``put`` renames to ``path``; else it is removed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays a link
        self.partial, self.old = ownership.names_aside(self.path)
        # A pipe or a device is written directly and must not be replaced.
        self._direct = self.path.exists() and not self.path.is_file() and not self.path.is_dir()

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, *_: object) -> None:
        ownership.remove(self.partial)
        if self.path.exists():
            ownership.remove(self.old)

    @contextmanager
    def open(self, durable: bool) -> Iterator[IO[bytes]]:
        with (self.path if self._direct else self.partial).open("wb") as file:
            yield file
            file.flush()
            if durable and not self._direct:
                os.fsync(file.fileno())

    def put(self, keep: Path | None = None) -> None:
        """Rename to ``path``. The old file is moved to ``keep``, and back if that fails."""
        if self._direct:
            return
        if self.path.is_file():
            shutil.copymode(self.path, self.partial)
        if keep is not None and self.path.exists() and self.path.is_dir() == self.partial.is_dir():
            os.replace(self.path, keep)
        try:
            os.replace(self.partial, self.path)
        except OSError:
            if keep is not None and keep.exists():
                os.replace(keep, self.path)
            raise
        with suppress(OSError):  # where the file system supports it, the rename as well
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def take_back(self) -> None:
        """Undo ``put(self.old)``."""
        with suppress(OSError):
            if self.old.exists():
                os.replace(self.old, self.path)
            elif not self._direct:
                self.path.unlink()
