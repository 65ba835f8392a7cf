"""Which files Paceline wrote: only these are replaced without ``force``, which names others first.

A folder that is written as a whole has ``.paceline.json``, the SHA-256 of every file in it; a
report ends in a comment with the SHA-256 of its text; other formats are recognised by their
content.
"""

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
Proof = Callable[[Path], bool]  # whether Paceline wrote the file; any error means no
_SIGNED = "Written by Paceline; sha256 "
_SIGNATURE = re.compile(rb"\A(.*\n)[^\n]*%b([0-9a-f]{64})[^\n]*\n\Z" % _SIGNED.encode(), re.S)
_RUN, _numbers = os.urandom(4).hex(), count()  # of this process, as ids are used again
_NAMED = 5  # files in a message
# Called with a line for what is replaced; None: foreign files are refused.
_forced: ContextVar[Callable[[str], None] | None] = ContextVar("paceline_forced", default=None)


def force(log: Callable[[str], None] | None) -> None:
    """Replace foreign files in this context, after ``log`` got their names; None: refuse them."""
    warned = set[str]()

    def once(line: str) -> None:
        if log is not None and line not in warned:
            warned.add(line)
            log(line)

    _forced.set(None if log is None else once)


def check_file(path: str | Path, what: str, proof: Proof | None) -> None:
    """Refuse to replace a file without ``proof``; None: any file. Raises WriteError. Pipes and
    devices are written through and never replaced."""
    path = Path(path)
    if path.is_file() and not _proved(path, proof):
        _refuse(path, what, f"there is a file that Paceline did not write, {_size(path)}", [path])


def check_folder(path: str | Path, what: str, damaged: bool = False) -> None:
    """Raises WriteError if a folder has a file that its manifest does not prove. ``damaged``: files
    of the manifest may have other contents, as they can be made again."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"cannot write {what} {path}: it is a file; name a folder")
    known = {**read_manifest(folder), MANIFEST: ""}
    files = [file for file in sorted(folder.rglob("*")) if file.is_symlink() or not file.is_dir()]
    _check_manifest(folder, files, known, what, damaged)


def check_names(folder: Path, names: Sequence[str], what: str, damaged: bool = False) -> None:
    """As ``check_folder`` for these files of a folder alone; others stay and do not matter."""
    files = [file for name in names if (file := folder / name).exists()]
    _check_manifest(folder, files, read_manifest(folder), what, damaged)


def claim(folder: Path) -> None:
    """Make a folder for files that can be made again; in an existing folder they need a proof."""
    if not folder.exists():
        with suppress(FileExistsError):  # another process has just made it
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
    except OSError:
        return "unreadable"


def _proved(path: Path, proof: Proof | None) -> bool:
    if proof is None or not path.stat().st_size:
        return True
    with suppress(Exception):  # whatever a reader raises of a file of another kind
        return proof(path)
    return False


def digest_of(file: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """The SHA-256 of a file; ``advance`` is told the bytes read since the last time."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by name, as in ``a/b.json``; empty without a readable manifest."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): str(value) for name, value in listed.items()}
    return {}


def manifest_text(digests: Mapping[str, str]) -> str:
    about = "Written by Paceline, which replaces files of these SHA-256 only."
    return json.dumps({"about": about, "files": dict(sorted(digests.items()))}, indent=1) + "\n"


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder that has just been filled."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    digests = {file.relative_to(folder).as_posix(): digest_of(file) for file in files}
    digests.pop(MANIFEST, None)
    (folder / MANIFEST).write_text(manifest_text(digests), encoding="utf-8")


def signed(text: str) -> str:
    """A text with a last line for ``is_signed``, which is a comment in Markdown and HTML."""
    text = text.rstrip("\n") + "\n"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return f"{text}<!-- {_SIGNED}{digest} -->\n"


def is_signed(file: Path) -> bool:
    """Whether a text is as ``signed`` gave it."""
    signature = _SIGNATURE.match(file.read_bytes())
    return (
        signature is not None and hashlib.sha256(signature[1]).hexdigest() == signature[2].decode()
    )


def names_aside(path: Path) -> tuple[Path, Path]:
    """Names for the new ``path`` and for the old one while they are exchanged."""
    name = path.name.encode()[:170].decode(errors="ignore")
    mark = f".{name}.{os.getpid()}-{_RUN}-{next(_numbers)}"
    return path.with_name(f"{mark}.partial"), path.with_name(f"{mark}.old")


def clear_killed(path: Path) -> None:
    """Clear up after killed writers of ``path``: the old one comes back, partial ones go."""
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
    """Remove a file or a folder as far as possible, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_running(pid: int, run: str) -> bool:
    if pid == os.getpid():
        return run == _RUN
    try:
        if os.name == "posix":  # elsewhere the call would end the process
            os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True
