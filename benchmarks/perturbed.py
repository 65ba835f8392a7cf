"""A model that was born in 4 bits, as if it had been trained in 16.

What `pull` brings was dequantised from groups of 32 weights in 4 bits, so it is nearly its own form
in 4 bits, and a draft of that form accepts more than that of another model would. Here each weight
is moved by up to half a step of its group, at random: the size that rounding to 4 bits has for a
model that was trained in 16 bits. The copy is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch

from paceline.files import cache_folder, folder_aside

_GROUP = 32
_STEPS = 15
_SEED = 0


def moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix of a checkpoint whose inputs divide into groups, with that noise."""
    generator = torch.Generator().manual_seed(_SEED)
    result = dict(state)
    for key, tensor in state.items():
        if tensor.dim() != 2 or tensor.shape[1] % _GROUP:
            continue
        groups = tensor.float().view(tensor.shape[0], -1, _GROUP)
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / _STEPS
        noise = torch.rand(groups.shape, generator=generator) - 0.5
        result[key] = (groups + noise * step).view_as(tensor).to(tensor.dtype)
    return result


def perturbed(folder: Path) -> Path:
    """The folder of a perturbed copy, made now if it is not there. Raises WriteError."""
    from safetensors.torch import load_file, save_file

    (weights,) = folder.glob("*.safetensors")
    about = weights.stat()
    mark = json.dumps([str(weights.resolve()), about.st_size, about.st_mtime_ns, _SEED])
    digest = hashlib.sha256(mark.encode()).hexdigest()[:12]
    out = cache_folder() / "perturbed" / f"{folder.name}-{digest}"
    if not (out / "config.json").is_file():
        with folder_aside(out, "the perturbed model") as partial:
            for file in folder.iterdir():
                if file.is_file() and file != weights and not file.name.startswith("."):
                    shutil.copy2(file, partial / file.name)
            save_file(moved(load_file(weights)), partial / weights.name, {"format": "pt"})
    return out
