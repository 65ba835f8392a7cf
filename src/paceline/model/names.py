"""Built-in model names: those inside the package, and those that ``paceline pull`` has fetched."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelLoadError
from paceline.model.store import PULLABLE, SMOLLM2, Pullable, megabytes, pulled

PREFIX = "paceline/"
EMBEDDED = "paceline/tiny"
BUILT_IN = (
    EMBEDDED,
    "paceline/tiny-draft",
    "paceline/tiny-eagle",
    "paceline/tiny-eagle3",
    "paceline/tiny-medusa",
)
# Trained drafters of this package by their target, the best first: their kind and their name.
MADE_FOR = {
    EMBEDDED: (("eagle3", "paceline/tiny-eagle3"), ("model", "paceline/tiny-draft")),
    SMOLLM2.full_name: (("eagle3", "paceline/smollm2-eagle3"),),
}
# Heads and a draft for paceline/smollm2: built in as well, where this version ships them.
FOR_SMOLLM2 = (
    "paceline/smollm2-eagle3",
    "paceline/smollm2-medusa",
    "paceline/smollm2-draft",
)


class NotPulledError(ModelLoadError):
    """The name is right, but the model has not been fetched yet."""

    def __init__(self, entry: Pullable) -> None:
        super().__init__(
            f"{entry.full_name} has not been fetched yet; run `paceline pull {entry.name}` once "
            f"({megabytes(entry.download)} to download, {megabytes(entry.on_disk)} on the disk)"
        )
        self.entry = entry


def resolve(name: str) -> str:
    """The folder of a built-in or pulled model; any other name or path is returned as it is.

    Raises ModelLoadError if a built-in name is unknown or its weights are not installed, and
    NotPulledError, one of these, if `paceline pull` would fetch it.
    """
    if not name.startswith(PREFIX) or Path(name).is_dir():
        return name
    entry = PULLABLE.get(name.removeprefix(PREFIX))
    if entry is not None:
        folder = pulled(entry)
        if folder is None:
            raise NotPulledError(entry)
        return str(folder)
    if name not in BUILT_IN and not has_assets(name):
        known = [*BUILT_IN, *(other for other in FOR_SMOLLM2 if has_assets(other))]
        known += [other.full_name for other in PULLABLE.values()]
        raise ModelLoadError(
            f"there is no built-in model {name!r}; the built-in ones are {', '.join(known)}"
        )
    if not has_assets(name):
        raise ModelLoadError(
            f"the weights of {name} are not part of this installation; "
            "reinstall paceline, or name a model folder or a hub model instead"
        )
    return str(_assets(name))


def located(name: str) -> str:
    """As ``resolve``, with the user's home written out."""
    path = resolve(name)
    return str(Path(path).expanduser()) if path.startswith("~") else path


def has_assets(name: str) -> bool:
    """Whether the weights of a built-in name are inside this installation."""
    return name in (*BUILT_IN, *FOR_SMOLLM2) and any(_assets(name).glob("*.safetensors"))


def _assets(name: str) -> Path:
    return Path(__file__).resolve().parent.parent / "assets" / name.removeprefix(PREFIX)
