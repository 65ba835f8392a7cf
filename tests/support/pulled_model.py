"""A tiny model in the place where `paceline pull smollm2` would have put the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.model import names
from paceline.model.names import MARKER, SMOLLM2, model_folder


def plant(patch: pytest.MonkeyPatch, cache: Path, source: str, context: int = 4096) -> Path:
    """Until the test ends there is a pulled paceline/smollm2, and nobody names a model; what is
    trained for the real one does not fit it, and is not there."""
    patch.setitem(names.MADE_FOR, SMOLLM2.full_name, ())
    patch.setenv("PACELINE_CACHE", str(cache))
    patch.delenv("PACELINE_MODEL", raising=False)
    folder = model_folder(SMOLLM2)
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context  # room for the demo's real questions
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = (folder / "model.safetensors").stat().st_size
    marker = {"name": SMOLLM2.name, "sha256": SMOLLM2.weights_sha256, "bytes": size}
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    return folder
