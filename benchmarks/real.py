"""The real model of the benchmarks: SmolLM2-135M-Instruct on public prompts.

Unlike the small pair it ends its answers. What it would write after the end token is never read,
and may be easy or hard to draft. So answers end where the model ends them, and engines are compared
by tokens per second: with greedy requests all of them write the same tokens."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import inflate
from paceline.files import atomic_folder, cache_folder

NAME = "smollm2"
TARGET = "paceline/smollm2"
DRAFTS = {
    "draft": "paceline/smollm2-draft",
    "medusa": "paceline/smollm2-medusa",
    "eagle3": "paceline/smollm2-eagle3",
}
# MT-Bench is Spec-Bench's multi-turn conversation; the others of its six tasks follow.
SETS = ("mt_bench", "gsm8k", "humaneval", "summarization", "translation", "qa")
SETS += ("math_reasoning", "rag")


# The model of `pull` was dequantised from 4 bits in groups of 32 weights, so it almost equals its
# own 4-bit copy, and drafts of that copy are accepted more often than those of other models. In the
# perturbed copy each weight is moved by up to half a step of its group, which is the error of
# rounding a model that was trained in 16 bits to 4 bits.
_GROUP, _STEPS, _SEED = 32, 15, 0


def moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint with this noise on every matrix whose inputs divide into groups."""
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
    """The folder of the perturbed copy, which is written if it is missing. Raises WriteError."""
    (weights,) = folder.glob("*.safetensors")
    about = weights.stat()
    mark = json.dumps([str(weights.resolve()), about.st_size, about.st_mtime_ns, _SEED])
    digest = hashlib.sha256(mark.encode()).hexdigest()[:12]
    out = cache_folder() / "perturbed" / f"{folder.name}-{digest}"
    if not (out / "config.json").is_file():
        with atomic_folder(out, "the perturbed model") as partial:
            for file in folder.iterdir():
                if file.is_file() and file != weights and not file.name.startswith("."):
                    shutil.copy2(file, partial / file.name)
            save_file(moved(load_file(weights)), partial / weights.name, {"format": "pt"})
    return out


def target_folder(given: str | None, perturb: bool = False) -> Path:
    """The folder of the model: the ``given`` one or the pulled one; with ``perturb`` its perturbed
    copy. Exits with a message if there is none."""
    try:
        folder = inflate.resolve(given or TARGET)
        return perturbed(folder) if perturb else folder
    except inflate.InflateError as error:
        if given:
            raise SystemExit(f"error: {error}") from None
        raise SystemExit(
            f"error: {TARGET} is not on this machine; fetch it with `paceline pull {NAME}`, "
            "or name its folder with --model"
        ) from None


def find(kind: str, given: str | None) -> str | None:
    """The folder of a draft's or a head's weights; None, with a message, if the published one is
    missing. Exits if a ``given`` one is missing."""
    if given == "none":
        return None
    try:
        return str(inflate.resolve(given or DRAFTS[kind]))
    except inflate.InflateError as error:
        if given:
            raise SystemExit(f"error: --{kind}: {error}") from None
        print(f"left out {kind}: {DRAFTS[kind]} is not on this machine", file=sys.stderr)
        return None


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add options for the drafts and heads ("none" omits one), and for a perturbed target."""
    for kind, name in DRAFTS.items():
        parser.add_argument(f"--{kind}", help=f"folder, or none to omit it; default: {name}")
    parser.add_argument(
        "--perturb",
        action="store_true",
        help=f"move each weight of {NAME} by up to half a 4-bit step, to measure what quantized "
        "drafts gain on a model that was trained in 16 bits",
    )
