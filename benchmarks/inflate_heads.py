"""Writes Medusa or EAGLE heads for an inflated target that draft the same tokens as the small ones.

The features of an inflated target are those of the small one, followed by zeros (see inflate.py).
The heads are padded to read them, and cost as much as heads for a model of that size:

    inputs         every matrix that reads features gets random columns for the zeros, block by
                   block, because [f1, f2, f3] becomes [f1, 0, f2, 0, f3, 0]
    hidden state   as in the target: rows that would write into the padding are zero, norms scaled
    layer ids      those of the same layers in the inflated target

    python benchmarks/inflate_heads.py paceline/tiny-eagle3 --model paceline/tiny --preset target"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from inflate import (
    PRESETS,
    InflateError,
    Padding,
    Shape,
    Sizes,
    mark_of,
    positions,
    read_shape,
    resolve,
    wider,
    write_once,
)
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, load_eagle, save_eagle
from paceline.draft.heads.medusa_head import MedusaHeads, load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.errors import PacelineError

_MEDUSA = "medusa_lm_head.safetensors"
_READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_WRITERS = ("o_proj.weight", "down_proj.weight")


def pad_medusa(heads: MedusaHeads, target: Shape, big: Shape) -> MedusaHeads:
    """Pad Medusa heads for the wider final hidden state."""
    padding = Padding(target.hidden, big.hidden)
    padded = MedusaHeads(replace(heads.config, hidden_size=big.hidden))
    tensors = {}
    for name, weight in heads.state_dict().items():
        if name.endswith("linear.weight"):
            weight = padding.fusing(name, weight)
        elif name.endswith("linear.bias"):
            weight = padding.zeros(weight, (big.hidden,))
        elif name.endswith(".weight"):
            weight = padding.reading(name, weight, len(weight))
        tensors[name] = weight
    padded.load_state_dict(tensors)
    return padded.to(next(heads.parameters()).dtype)


def pad_eagle(head: EagleHead, target: Shape, big: Shape) -> EagleHead:
    """Pad an EAGLE head, so that its layer is as wide as those of the inflated target."""
    config = head.config
    if config.hidden_size != target.hidden:
        raise InflateError(
            f"the head is {config.hidden_size} wide and its target {target.hidden}; only heads of "
            "the target's width can be inflated"
        )
    ffn = max(config.ffn_size, config.ffn_size * big.ffn // target.ffn)
    shape = Shape(target.hidden, 1, config.ffn_size, config.heads, config.kv_heads, config.head_dim)
    layer = wider(shape, Sizes(big.hidden, 1, ffn))
    wide = _wider_config(config, target, big, layer)
    known = None if config.version == 1 else (head.d2t + torch.arange(len(head.d2t))).tolist()
    padded = EagleHead(wide, known)
    padding = Padding(target.hidden, big.hidden)
    shapes = {name: tuple(weight.shape) for name, weight in padded.state_dict().items()}
    tensors = {
        name: _pad_eagle_tensor(padding, name, weight, shapes[name])
        for name, weight in head.state_dict().items()
    }
    padded.load_state_dict(tensors)
    return padded.to(head.dtype)


def _wider_config(config: EagleConfig, target: Shape, big: Shape, layer: Shape) -> EagleConfig:
    layers = [*positions(target.layers, big.layers), big.layers]  # the last is the final norm
    return replace(
        config,
        hidden_size=big.hidden,
        target_hidden_size=big.hidden,
        target_layers=big.layers,
        feature_layers=tuple(layers[index] for index in config.feature_layers),
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        ffn_size=layer.ffn,
        rms_norm_eps=config.rms_norm_eps * target.hidden / big.hidden,
    )


def _pad_eagle_tensor(
    padding: Padding, name: str, weight: Tensor, shape: tuple[int, ...]
) -> Tensor:
    if name in ("d2t", "t2d"):
        return weight
    if name == "fc.weight":
        return padding.fusing(name, weight)
    if name == "lm_head.weight" or name.endswith(_READERS):
        return padding.reading(name, weight, shape[0])
    if name.endswith("norm.weight"):
        return padding.norm(name, weight)
    assert name == "embed_tokens.weight" or name.endswith((".bias", *_WRITERS)), name
    return padding.zeros(weight, shape)


def inflate_heads(
    heads: str | Path, model: str | Path, sizes: Sizes, out: str | Path | None = None
) -> Path:
    """Write heads of ``model`` for ``inflate(model, sizes)``, or reuse them; return their folder.

    Raises InflateError and, for heads that do not belong to the model, ModelLoadError."""
    source = resolve(str(heads))
    config = json.loads((resolve(str(model)) / "config.json").read_text())
    target = read_shape(config)
    big = wider(target, sizes)

    def write(partial: Path) -> None:
        shape = TargetShape(target.hidden, config["vocab_size"], target.layers)
        if (source / _MEDUSA).is_file():
            save_medusa(
                pad_medusa(load_medusa(str(source), shape), target, big), partial, big.layers
            )
        else:
            save_eagle(pad_eagle(load_eagle(str(source), shape), target, big), partial)
        (partial / "README.md").write_text(
            f"# {source.name}, inflated\n\nThe same heads for a target padded to {big.layers} "
            f"layers x {big.hidden}. For measuring speed only; figures from them are to be "
            "labelled as inflated.\n"
        )

    return write_once(source, big, mark_of(source, asdict(target), asdict(sizes)), out, write)


def main() -> None:
    """Inflate as the command line says and print the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("heads", help="folder of Medusa or EAGLE heads, or a built-in name")
    parser.add_argument("--model", required=True, help="the target that the heads are for")
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True, help="as the target's")
    parser.add_argument("--out", help="folder to write; default: the cache folder")
    args = parser.parse_args(sys.argv[1:])
    try:
        print(inflate_heads(args.heads, args.model, PRESETS[args.preset], args.out))
    except (InflateError, PacelineError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
