"""Decides which files Paceline wrote. Only these are replaced, unless ``force`` is in effect, which
first logs the names of the others.

A folder that is written as a whole has a manifest, ``.paceline.json``, with the SHA-256 of every
file in it. A report ends with a comment that holds the SHA-256 of its text. Other formats are
recognised by their content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path

from paceline.errors import WriteError

MANIFEST = ".paceline.json"
Proof = Callable[[Path], bool]  # whether Paceline wrote the file; an exception means no
_SIGNED = "Written by Paceline; sha256 "
_SIGNATURE = re.compile(rb"\A(.*\n)[^\n]*%b([0-9a-f]{64})[^\n]*\n\Z" % _SIGNED.encode(), re.S)
_RUN, _numbers = os.urandom(4).hex(), count()  # identify this process, as process ids are reused
_NAMED = 5  # most files that an error message names
# Called with a line for each foreign file to be replaced; None: foreign files are refused.
_forced: ContextVar[Callable[[str], None] | None] = ContextVar("paceline_forced", default=None)


def force(log: Callable[[str], None] | None) -> None:
    """Replace foreign files from now on, after ``log`` got their names; None: refuse them."""
    warned = set[str]()

    def once(line: str) -> None:
        if log is not None and line not in warned:
            warned.add(line)
            log(line)

    _forced.set(None if log is None else once)


def check_file(path: str | Path, what: str, proof: Proof | None) -> None:
    """Raise WriteError if there is a file that ``proof`` does not accept (None accepts any). Pipes
    and devices pass, because they are written to and never replaced."""
    path = Path(path)
    if path.is_file() and not _proved(path, proof):
        _refuse(path, what, f"there is a file that Paceline did not write, {_size(path)}", [path])


def check_folder(path: str | Path, what: str, damaged: bool = False) -> None:
    """Raise WriteError if a folder has a file that does not match its manifest. ``damaged``: files
    in the manifest may have other contents, because they can be made again."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"cannot write {what} {path}: it is a file; name a folder")
    known = {**read_manifest(folder), MANIFEST: ""}
    files = [file for file in sorted(folder.rglob("*")) if file.is_symlink() or not file.is_dir()]
    _check_manifest(folder, files, known, what, damaged)


def check_names(folder: Path, names: Sequence[str], what: str, damaged: bool = False) -> None:
    """``check_folder`` for the files of these names only. Other files of the folder are ignored."""
    files = [file for name in names if (file := folder / name).exists()]
    _check_manifest(folder, files, read_manifest(folder), what, damaged)


def claim(folder: Path) -> None:
    """Make a cache folder, marked as ours by an empty manifest; no effect if it exists."""
    if not folder.exists():
        with suppress(FileExistsError):  # another process may have made it just now
            folder.mkdir(parents=True)
            (folder / MANIFEST).write_text(manifest_text({}), encoding="utf-8")


def is_claimed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _check_manifest(
    folder: Path, files: Sequence[Path], known: Mapping[str, str], what: str, damaged: bool
) -> None:
    def ours(file: Path) -> bool:
        name = file.relative_to(folder).as_posix()
        if file.is_symlink() or name not in known:
            return False
        return damaged or name == MANIFEST or digest_of(file) == known[name]

    if foreign := [file for file in files if not ours(file)]:
        shown = [f"{file.relative_to(folder)} ({_size(file)})" for file in foreign]
        if len(shown) > _NAMED and _forced.get() is None:
            shown[_NAMED:] = [f"{len(shown) - _NAMED} more"]
        why = f"it holds files that Paceline did not write or that were changed: {', '.join(shown)}"
        _refuse(folder, what, why, foreign)


def _refuse(path: Path, what: str, why: str, files: Sequence[Path]) -> None:
    log = _forced.get()
    if log is None:
        raise WriteError(
            f"cannot write {what} {path}: {why}; choose another place, or move them away "
            "(--force deletes them)".replace("them", "them" if len(files) > 1 else "it")
        )
    log(f"--force: replacing {path}: {why}")


def _size(file: Path) -> str:
    try:
        return f"{file.lstat().st_size:,} bytes"
    except OSError:  # a folder whose files may be listed, but not looked at
        return "unreadable"


def _proved(path: Path, proof: Proof | None) -> bool:
    if proof is None or not path.stat().st_size:
        return True
    with suppress(Exception):  # reading a file of another kind can raise anything
        return proof(path)
    return False


def digest_of(file: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """SHA-256 of a file. ``advance`` is called with the bytes read since the last call."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """The manifest of a folder: SHA-256 by name, as ``a/b.json``; empty if it cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): str(value) for name, value in listed.items()}
    return {}


def manifest_text(digests: Mapping[str, str]) -> str:
    about = "Written by Paceline, which replaces files of these SHA-256 only."
    return json.dumps({"about": about, "files": dict(sorted(digests.items()))}, indent=1) + "\n"


def write_manifest(folder: Path) -> None:
    """Write the manifest for all files of a new folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    digests = {file.relative_to(folder).as_posix(): digest_of(file) for file in files}
    digests.pop(MANIFEST, None)
    (folder / MANIFEST).write_text(manifest_text(digests), encoding="utf-8")


def signed(text: str) -> str:
    """Add a last line with the SHA-256 of the text, which is a comment in Markdown and HTML."""
    text = text.rstrip("\n") + "\n"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return f"{text}<!-- {_SIGNED}{digest} -->\n"


def is_signed(file: Path) -> bool:
    """Whether a file is unchanged since ``signed`` made its text."""
    signature = _SIGNATURE.match(file.read_bytes())
    return (
        signature is not None and hashlib.sha256(signature[1]).hexdigest() == signature[2].decode()
    )


def names_aside(path: Path) -> tuple[Path, Path]:
    """Temporary names for the new file and for the old one during a replacement."""
    name = path.name.encode()[:170].decode(errors="ignore")
    mark = f".{name}.{os.getpid()}-{_RUN}-{next(_numbers)}"
    return path.with_name(f"{mark}.partial"), path.with_name(f"{mark}.old")


def clear_killed(path: Path) -> None:
    """Clean up after killed writers of ``path``: restore the old file, remove partial ones."""
    name = re.compile(rf"\.{re.escape(path.name)}\.(\d+)-([0-9a-f]+)(-\d+)?\.(partial|old)")
    for left in path.parent.glob("." + glob.escape(path.name) + ".*"):
        match = name.fullmatch(left.name)
        if match is None or _is_running(int(match[1]), match[2]):
            continue
        if match[4] == "old" and not path.exists():
            os.replace(left, path)
        else:
            remove(left)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_running(pid: int, run: str) -> bool:
    if pid == os.getpid():
        return run == _RUN
    try:
        if os.name == "posix":  # on Windows the call would end the process
            os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True
