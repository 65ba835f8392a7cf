"""Built-in model names: the embedded pair lives inside the package."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelLoadError

PREFIX = "paceline/"
BUILT_IN = (
    "paceline/tiny",
    "paceline/tiny-draft",
    "paceline/tiny-eagle",
    "paceline/tiny-eagle3",
    "paceline/tiny-medusa",
)


def resolve(name: str) -> str:
    """The folder of a built-in model; any other name or path is returned as it is.

    Raises ModelLoadError if a built-in name is unknown or its weights are not installed.
    """
    if not name.startswith(PREFIX) or Path(name).is_dir():
        return name
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ModelLoadError(f"there is no built-in model {name!r}; the built-in ones are {known}")
    folder = Path(__file__).resolve().parent.parent / "assets" / name.removeprefix(PREFIX)
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"the weights of {name} are not part of this installation; "
            "reinstall paceline, or name a model folder or a hub model instead"
        )
    return str(folder)
