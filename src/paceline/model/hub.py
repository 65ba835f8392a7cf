"""Where a model or a head is read from: a built-in one, a folder or file, or the model hub. The hub
is asked once for a name and process, and only for names such as OWNER/NAME. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from paceline.core.stages import stage
from paceline.errors import ModelLoadError
from paceline.files import FileStamp
from paceline.model.gguf import SUFFIX, gguf_file
from paceline.model.names import BUILT_IN, FOR_SMOLLM2, PREFIX, PULLABLE, located

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_OTHERS = ["*/*", "consolidated*"]  # the same weights in other layouts


def fetched(name: str) -> str:
    """The folder or GGUF file of a name; a hub name is downloaded first. Raises ModelLoadError."""
    path = located(name)
    if is_path(path):
        return path
    check_hub_name(name)
    answer = _ask(name)
    if isinstance(answer, ModelLoadError):
        raise ModelLoadError(str(answer))
    return answer


def is_path(path: str) -> bool:
    """Whether it is a path, also one that does not exist: a hub name is ``owner/name``."""
    written_as_path = path.startswith((".", "/", "~")) or path.endswith(SUFFIX) or "\\" in path
    return written_as_path or path.count("/") > 1 or Path(path).exists()


def check_hub_name(name: str) -> None:
    """Raises ModelLoadError for a name that cannot be one of the hub."""
    owner, slash, model = name.partition("/")
    if not (owner and slash and model):
        known = [*BUILT_IN, *FOR_SMOLLM2, *(entry.full_name for entry in PULLABLE.values())]
        short = {full_name.removeprefix(PREFIX): full_name for full_name in known}
        near = difflib.get_close_matches(name.lower(), short, 1)
        hint = f"did you mean {short[near[0]]}?" if near else "check the spelling"
        raise ModelLoadError(
            f"{name} is no local folder and no built-in name; {hint} (Names on the model hub have "
            "an owner, as in OWNER/NAME.)"
        )


@cache
def _ask(name: str) -> str | ModelLoadError:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        with stage(f"asking the model hub for {name}"):
            for weights in ("*.safetensors", "*.bin"):
                wanted = [*SMALL, weights]
                path = snapshot_download(name, allow_patterns=wanted, ignore_patterns=_OTHERS)
                folder = Path(path)
                if any(folder.glob(weights)):
                    break
    except Exception as error:  # the client's own errors and those of its HTTP library
        return ModelLoadError(hub_message(name, error))
    return str(folder)


def hub_message(name: str, error: Exception) -> str:
    """One line for a name that is no folder and that the hub did not send."""
    reason = first_line(error)
    words = ("offline", "connect", "internet", "reach", "resolution", "local cache")
    if any(word in reason.lower() for word in words) or "cached files" in reason:
        return (
            f"{name} is no local folder, and the model hub cannot be reached; "
            "give the path of a downloaded model, or go online"
        )
    return (
        f"{name} is neither a local folder nor a model on the hub that can be read ({reason}); "
        "check the spelling"
    )


def first_line(error: BaseException) -> str:
    """The first line of a message, without the full stop."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def stamps_of(path: str, weights: Callable[[Path], list[Path]]) -> tuple[FileStamp, ...]:
    """Stamps of a model's safetensors or GGUF file; ``weights`` finds those of a folder."""
    gguf, folder = gguf_file(path), Path(path)
    with suppress(OSError):
        files = [gguf] if gguf is not None else weights(folder)
        if files:
            config = [folder / "config.json"] if gguf is None else []
            return tuple(FileStamp.of(file) for file in [*files, *config])
    return ()
