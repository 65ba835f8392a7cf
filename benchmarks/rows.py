"""The rows of drafters.py: a draft spec for each drafter whose weights are available."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import inflate
import real
from inflate_heads import inflate_heads
from paceline.draft.selfspec import skippable, spread
from paceline.drafters import DRAFTERS, NoDraft
from paceline.model.loading import load_tokenizer
from paceline.model.names import EMBEDDED

_NAMES = {"model": "draft", "tree": "draft_tree"}  # of rows; others are named by their kind


@dataclass(frozen=True)
class Weights:
    """Folders of the weights of one target's drafters; None if they are missing."""

    target: str
    draft: str | None = None
    medusa: str | None = None
    eagle: str | None = None
    eagle3: str | None = None
    skip: str | None = None  # the option that fixes the layers to skip


def skip_option(old: int, new: int) -> str:
    """The first layers that a search for skippable layers tries, for a target inflated from ``old``
    to ``new`` layers: each chosen layer with the idle ones after it.

    The search itself would find that idle layers can be skipped at no loss."""
    where = [*inflate.positions(old, new), new]
    candidates = skippable(old)
    chosen = spread(candidates, min(len(candidates), max(1, round(0.45 * old))))
    skipped = (n for layer in chosen for n in range(where[layer], where[layer + 1]))
    return ":skip=" + "x".join(map(str, skipped))


def specs_of(weights: Weights) -> dict[str, str]:
    """The spec of every drafter by the name of its row; "" if its weights are missing."""
    last = f"eagle3:{weights.eagle3}" if weights.eagle3 else f"model:{weights.draft}"
    special = {
        "tree": _with("tree:", weights.draft, ",nodes=8,width=3"),
        "layer_skip": f"layer_skip{weights.skip or ''}",
        "quantized": "quantized:int4",
        "hybrid": f"hybrid:suffix+ngram+{last}" if weights.eagle3 or weights.draft else "",
    }
    specs = {}
    for kind, record in DRAFTERS.items():
        folder = getattr(weights, record.weights, None)
        spec = special.get(kind, _with(f"{kind}:", folder) if record.weights else kind)
        if kind != NoDraft.kind:
            specs[_NAMES.get(kind, kind)] = spec
    return specs


def weights_of(args: argparse.Namespace) -> Weights:
    """The folders of the target of ``--pair`` and of its drafters. Inflated ones are written if
    they are missing. Raises InflateError if there is no such target."""
    if args.pair == real.NAME:
        folders = {kind: real.find(kind, getattr(args, kind)) for kind in real.DRAFTS}
        return Weights(str(real.target_folder(args.target, args.perturb)), **folders)
    if args.pair not in ("tiny", "inflated"):
        named = {kind: find(getattr(args, kind)) for kind in real.DRAFTS}
        return Weights(str(inflate.resolve(args.pair)), **named)
    source = args.target or EMBEDDED
    kinds = ("draft", "medusa", "eagle", "eagle3")
    names = {kind: getattr(args, kind, None) or f"{EMBEDDED}-{kind}" for kind in kinds}
    if args.pair == "tiny":
        same = {kind: find(name) for kind, name in names.items()}
        return Weights(str(inflate.resolve(source)), **same)
    big, small = (inflate.PRESETS[preset] for preset in args.presets.split(","))
    heads = {
        kind: find(name, lambda folder: inflate_heads(folder, source, big))
        for kind, name in names.items()
        if kind != "draft"
    }
    draft = find(names["draft"], lambda folder: inflate.inflate(folder, small))
    config = json.loads((inflate.resolve(source) / "config.json").read_text())
    skip = skip_option(inflate.read_shape(config).layers, big.layers)
    return Weights(str(inflate.inflate(source, big)), draft, **heads, skip=skip)


def write_useless(weights: Weights, folder: Path) -> str:
    """The spec of a draft model with random weights, in the shape of the draft or the target."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = weights.draft or weights.target
    if not (folder / "config.json").is_file():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        model.save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
    return f"model:{folder}"


def _with(kind: str, folder: str | None, options: str = "") -> str:
    return f"{kind}{folder}{options}" if folder else ""


def find(name: str | None, pad: Callable[[Path], Path] = lambda folder: folder) -> str | None:
    """The folder of a drafter's weights, converted by ``pad``; None if there are none."""
    if name is None:
        return None
    try:
        return str(pad(inflate.resolve(name)))
    except inflate.InflateError:
        return None
