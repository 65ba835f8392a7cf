"""Writes a larger Llama checkpoint that computes the same function as a small one.

On a CPU, a model of ten million parameters mostly measures Python, but users run models that are
bound by memory. An inflated pair has the cost of a real model and the acceptance of a small pair:

    hidden state   x' = [x, 0]: embeddings padded with zeros, and every row of o_proj and down_proj
                   that would write into the padding is zero
    RMSNorm        mean(x'^2) = h/H mean(x^2), so weight' = weight sqrt(h/H), eps' = eps h/H;
                   exact in bf16 too where H/h is a power of four (256 -> 1024, 192 -> 768)
    heads, neurons new ones have random weights; their columns in o_proj and down_proj are zero
    layers         new ones have o_proj = down_proj = 0 and are spread evenly between the old ones,
                   so that the first half of the layers is half of the model (for early exit)
    other weights  small random normals, exact in bf16, so that nothing can be skipped or compressed

    python benchmarks/inflate.py MODEL --preset target           # about 400M, into the cache folder
    python benchmarks/inflate.py MODEL --preset 8b --out DIR

Heads that read a model's hidden states are inflated by inflate_heads.py."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ModelLoadError, PacelineError
from paceline.files import atomic_folder, cache_folder, check_new
from paceline.model.names import resolve as named

FORMAT = 4  # part of the fingerprint: raise it when the files written here change
MARKER = "inflated.mark"
NOISE = 0.02  # standard deviation of the new weights


class InflateError(ValueError):
    """The source cannot be inflated to the requested size; the message says why."""


@dataclass(frozen=True)
class Sizes:
    """The size of the checkpoint to write: widths in elements, layers as a count."""

    hidden: int
    layers: int
    ffn: int


PRESETS: dict[str, Sizes] = {
    "target": Sizes(hidden=1024, layers=24, ffn=4352),  # about 400M with a vocabulary of 4096
    "draft": Sizes(hidden=768, layers=4, ffn=2304),  # about 30M
    "8b": Sizes(hidden=4096, layers=32, ffn=16384),
    "0.6b": Sizes(hidden=768, layers=28, ffn=7936),
}


@dataclass(frozen=True)
class Shape(Sizes):
    """The sizes of a Llama configuration that padding depends on."""

    heads: int
    kv_heads: int
    head_dim: int


def read_shape(config: dict[str, Any]) -> Shape:
    """Read the sizes of a `config.json`; raises InflateError for anything but a plain Llama."""
    if config.get("model_type") != "llama":
        raise InflateError(
            f"only Llama checkpoints can be inflated, not {config.get('model_type')!r}"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise InflateError("checkpoints with attention or MLP biases cannot be inflated")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
    )


def wider(small: Shape, sizes: Sizes) -> Shape:
    """The shape to write; the head dimension and the ratio of query to KV heads are kept."""
    ratio = small.heads // small.kv_heads
    heads = max(small.heads, sizes.hidden // small.head_dim // ratio * ratio)
    big = Shape(sizes.hidden, sizes.layers, sizes.ffn, heads, heads // ratio, small.head_dim)
    for name in ("hidden", "layers", "ffn"):
        if getattr(big, name) < getattr(small, name):
            raise InflateError(
                f"{name} {getattr(big, name)} is smaller than the source's {getattr(small, name)}; "
                "a checkpoint can only grow"
            )
    return big


def positions(old: int, new: int) -> list[int]:
    """The index of each of ``old`` layers among ``new`` ones; those in between do nothing."""
    return [index * new // old for index in range(old)]


def noise(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small random normals, exact in bf16, that depend only on the tensor's name."""
    digest = hashlib.sha256(f"0:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    draw = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, NOISE, generator=generator)
    return draw.to(dtype)


@dataclass(frozen=True)
class Padding:
    """Pads tensors from a hidden state of ``old`` elements to ``new``."""

    old: int
    new: int

    def reading(self, name: str, weight: Tensor, rows: int) -> Tensor:
        """Pad a matrix ``[r, k * old]`` that reads the hidden state to ``[rows, k * new]``, block
        by block, with random weights."""
        blocks = weight.shape[1] // self.old
        padded = noise(name, (rows, blocks * self.new), weight.dtype)
        for block in range(blocks):
            start, source = block * self.new, block * self.old
            padded[: len(weight), start : start + self.old] = weight[:, source : source + self.old]
        return padded

    def fusing(self, name: str, weight: Tensor) -> Tensor:
        """Pad a matrix ``[old, k * old]`` that reads the hidden state and writes it."""
        padded = self.reading(name, weight, self.new)
        padded[self.old :] = 0
        return padded

    def zeros(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Pad a matrix that writes the hidden state, an embedding or a bias with zeros.

        The new columns ignore new heads and neurons. The new rows keep the padding of the state
        zero, which the norms and a tied head rely on."""
        padded = weight.new_zeros(shape)
        padded[tuple(slice(size) for size in weight.shape)] = weight
        return padded

    def norm(self, name: str, weight: Tensor) -> Tensor:
        """Pad the weights of an RMSNorm, scaled for the wider mean."""
        # Exact in bf16 if sqrt(old / new) is a power of two. Otherwise a rounded scale would
        # change the function; in float32 it changes by 1e-7.
        is_exact = math.log(self.new / self.old, 4).is_integer()
        dtype = weight.dtype if is_exact else torch.float32
        padded = 1.0 + noise(name, (self.new,), dtype)
        scale = math.sqrt(self.old / self.new)
        padded[: len(weight)] = (weight.double() * scale).to(dtype)
        return padded


def padded_tensors(
    folder: Path, small: Shape, big: Shape, tied: bool
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The name of each tensor of the inflated checkpoint, and a function that computes it."""
    source = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    padding = Padding(small.hidden, big.hidden)
    embeddings = source["model.embed_tokens.weight"]
    yield (
        "model.embed_tokens.weight",
        partial(padding.zeros, embeddings, (len(embeddings), big.hidden)),
    )
    query, key = big.heads * big.head_dim, big.kv_heads * big.head_dim
    readers = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
    readers |= {"mlp.gate_proj": big.ffn, "mlp.up_proj": big.ffn}
    writers = {"self_attn.o_proj": query, "mlp.down_proj": big.ffn}
    old_of = {new: old for old, new in enumerate(positions(small.layers, big.layers))}
    for index in range(big.layers):
        for part in (*readers, *writers, "input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{index}.{part}.weight"
            weight = source[f"model.layers.{old_of.get(index, 0)}.{part}.weight"]
            if index not in old_of:
                weight = weight[:0]  # a new layer has no old weights
            if part in readers:
                yield name, partial(padding.reading, name, weight, readers[part])
            elif part in writers:
                yield name, partial(padding.zeros, weight, (big.hidden, writers[part]))
            else:
                yield name, partial(padding.norm, name, weight)
    name = "model.norm.weight"
    yield name, partial(padding.norm, name, source[name])
    if not tied:
        head = source["lm_head.weight"]
        yield "lm_head.weight", partial(padding.reading, "lm_head.weight", head, len(head))


def resolve(model: str) -> Path:
    """The folder of a checkpoint, which is a path or a built-in name such as `paceline/tiny`."""
    folder = Path(model).expanduser()
    if not folder.is_dir() and model.startswith("paceline/"):
        try:
            folder = Path(named(model))
        except ModelLoadError as error:
            raise InflateError(str(error)) from None
    if not (folder / "config.json").is_file() or not [*folder.glob("*.safetensors")]:
        raise InflateError(
            f"{model!r} has no config.json and *.safetensors; name the folder of a Llama checkpoint"
        )
    return folder


def mark_of(source: Path, *settings: Any) -> str:
    """A hash of all that the written checkpoint depends on: source files, settings, format."""
    digest = hashlib.sha256(json.dumps([FORMAT, *settings]).encode())
    for path in sorted(p for p in source.iterdir() if p.is_file() and p.suffix != ".md"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def write_once(
    source: Path, shape: Shape, mark: str, out: str | Path | None, write: Callable[[Path], None]
) -> Path:
    """Let ``write`` fill the folder ``out`` (default: one in the cache folder), unless it already
    has the same ``mark``. Raises WriteError if it holds something else."""
    name = f"{source.name}-{shape.layers}x{shape.hidden}-{mark[:12]}"
    folder = Path(out).expanduser() if out else cache_folder() / "inflated" / name
    marker = folder / MARKER
    if not (marker.is_file() and marker.read_text() == mark):
        if out and not marker.is_file():
            check_new(folder, "the inflated checkpoint", folder=True)
        with atomic_folder(folder, "the inflated checkpoint") as aside:
            write(aside)
            (aside / MARKER).write_text(mark)
    return folder


def inflate(model: str | Path, sizes: Sizes, out: str | Path | None = None) -> Path:
    """Write the inflated checkpoint, or reuse it if it is there already; return its folder.

    Raises InflateError when the source is not a plain Llama or a size is smaller than the source's,
    WriteError when ``out`` holds something else."""
    source = resolve(str(model))
    config = json.loads((source / "config.json").read_text())
    small = read_shape(config)
    big = wider(small, sizes)

    def write(aside: Path) -> None:
        tied = bool(config.get("tie_word_embeddings", False))
        makers = dict(padded_tensors(source, small, big, tied))
        with ThreadPoolExecutor() as pool:  # generating random numbers uses one core per tensor
            tensors = dict(zip(makers, pool.map(lambda make: make(), makers.values()), strict=True))
        save_torch_state_dict(tensors, aside, max_shard_size="1GB", metadata={"format": "pt"})
        count = sum(tensor.numel() for tensor in tensors.values())
        _write_sidecars(source, config, aside, (small, big), count)

    return write_once(source, big, mark_of(source, asdict(sizes)), out, write)


def _write_sidecars(
    source: Path, config: dict[str, Any], folder: Path, shapes: tuple[Shape, Shape], count: int
) -> None:
    """Write config.json and README; copy the tokenizer and the generation defaults."""
    small, big = shapes
    for path in source.iterdir():
        weights = path.name.endswith((".safetensors", ".index.json"))
        written = path.name.lower() in ("config.json", "readme.md") or path.name.startswith(".")
        if path.is_file() and not weights and not written:
            shutil.copyfile(path, folder / path.name)
    label = {"model": source.name, "hidden": small.hidden, "layers": small.layers, "ffn": small.ffn}
    config = config | {
        "hidden_size": big.hidden,
        "num_hidden_layers": big.layers,
        "intermediate_size": big.ffn,
        "num_attention_heads": big.heads,
        "num_key_value_heads": big.kv_heads,
        "head_dim": big.head_dim,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * small.hidden / big.hidden,
        "inflated_from": label,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(
        f"# {source.name}, inflated\n\n{count / 1e6:.1f}M parameters that compute the same "
        f"function as `{source.name}` ({small.layers} layers x {small.hidden}), padded to "
        f"{big.layers} layers x {big.hidden}, {big.heads} heads ({big.kv_heads} KV), "
        f"FFN {big.ffn}.\n\n"
        "For measuring speed only: it generates the text of the small model at the cost of a model "
        "of this size. Label figures from it as inflated.\n"
    )


def main() -> None:
    """Inflate as the command line says and print the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="folder of a small Llama checkpoint, or paceline/tiny")
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--out", help="folder to write; default: the cache folder")
    args = parser.parse_args()
    try:
        print(inflate(args.model, PRESETS[args.preset], args.out))
    except (InflateError, PacelineError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
