"""Whether the engine computes what transformers does, on the checkpoint itself: the first layers up
to one of each kind, with the embedding and the head, in float32. Short sequences begin at the
start, in the middle and at the end of the context. Transformers runs them one by one; the engine in
ragged batches and in two pieces, on torch all, on the native kernels those at the start."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.batch import Span
from paceline.core.memory import free_memory, limit_threads
from paceline.core.stages import stage
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.lab.doctor.findings import Finding, finding, refusal
from paceline.lab.doctor.machine import size
from paceline.lab.doctor.models import ModelFiles, read_files, skeleton_of
from paceline.model.backends.base import NATIVE, REFERENCE
from paceline.model.loading import check_architecture, load_module, read_config, resolve_device
from paceline.model.names import first_line
from paceline.model.offload import decoder_layers
from paceline.model.precision import quantization_of
from paceline.model.target import UNLIMITED_POSITIONS, CausalModel

_ROWS, _FEWER = 32, 13  # of the two sequences at each position
_LIMIT = 2e-3  # of the spread of a row's logits; of random models rounding takes up to 2e-4
_COPIES = 2.5  # of the weights at the peak: as loaded, and as a backend lays them out
_FARTHEST = 1 << 17  # positions that are compared: tables of more take too long to make
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx"}
_NAMES = {REFERENCE: "torch", NATIVE: "the native kernels"}


class _NotComparedError(Exception):
    """Why the logits of a checkpoint are not compared."""


class _Sequence(NamedTuple):
    """Token ids, and their positions, which follow each other."""

    ids: list[int]
    positions: range


def check_logits(target: str, *, device: str = "auto", backend: str = "auto") -> Finding:
    """Compare the engine's logits with transformers' on some layers of a model: an error if they
    differ or it is refused, a note if they cannot be compared. Arguments as of ``LLM``. Raises
    ModelLoadError if there is no such model, ConfigError on an unusable device."""
    resolved, files = resolve_device(device), read_files(target)
    limit_threads()
    try:
        compared = _compared_with_transformers(files, resolved, backend)
    except _NotComparedError as reason:
        compared = finding("logits-unchecked", why=reason)
    except (ModelLoadError, UnsupportedModelError) as error:
        compared = refusal("architecture-refused", error)
    return replace(compared, about="target")


def _compared_with_transformers(files: ModelFiles, device: torch.device, backend: str) -> Finding:
    start, name = time.monotonic(), files.name
    if files.remote:
        raise _NotComparedError("the weights are not on this machine")
    config = read_config(name, str(files.folder))
    check_architecture(config)
    options = quantization_of(config)
    if options is not None and files.gguf is None:
        method = options.get("quant_method")
        raise _NotComparedError(f"layers of a checkpoint in {method} are not read by themselves")
    try:
        config, layers, needed = _some_layers(config)
    except Exception as error:  # whatever the code of an architecture raises
        raise _NotComparedError(f"no model is built of the config ({first_line(error)})") from None
    free = free_memory(device)
    if needed > free:
        takes = f"{layers} layers, embedding and head take {size(needed)} in float32"
        raise _NotComparedError(f"{takes}, but {size(free)} of memory are free")
    with stage(f"comparing {name} with transformers", total=3) as begun:
        module = load_module(name, "float32", device, "eager", config=config)
        begun.advance(1, "transformers' logits")
        sequences = _sequences(config)
        try:
            wanted = [_of_library(module, *sequence, device) for sequence in sequences]
        except Exception as error:  # whatever a model's own code raises
            problem = f"transformers' own forward fails ({first_line(error)})"
            raise _NotComparedError(problem) from None
        begun.advance(1, f"on {_NAMES[REFERENCE]}")
        off = {REFERENCE: _furthest(CausalModel.around(module, name, REFERENCE), sequences, wanted)}
        # Kernels are held to nothing where torch is off.
        if off[REFERENCE][0] <= _LIMIT and backend != REFERENCE and device.type == "cpu":
            begun.advance(1, f"on {_NAMES[NATIVE]}")
            model = CausalModel.around(module, name, NATIVE)
            if model.backend.name == NATIVE:
                off[NATIVE] = _furthest(model, sequences[:2], wanted[:2])
    how = f"{layers} layers, {time.monotonic() - start:.1f} s"
    return _verdict(off, sequences, how)


def _verdict(
    off: dict[str, tuple[float, int]], sequences: Sequence[_Sequence], how: str
) -> Finding:
    """``off``: by backend, as of ``_furthest``."""
    worst = max(off, key=lambda name: off[name])
    spreads, position = off[worst]
    if spreads > _LIMIT:
        code, name = "logits-differ", _NAMES[worst]
        cure = "Use --backend reference, and report this line." if worst == NATIVE else None
        return finding(code, None, cure, backend=name, position=position, spreads=spreads, how=how)
    runs = dict.fromkeys((s.positions[0], s.positions[-1]) for s in sequences[::2])
    positions = ", ".join(f"{first:,} to {last:,}" for first, last in runs)
    ways = " and ".join(_NAMES[backend] for backend in off)
    return finding("logits-equal", spreads=spreads, positions=positions, backends=ways, how=how)


def _some_layers(config: Any) -> tuple[Any, int, int]:
    """The config of the first layers, how many they are, and the memory that comparing takes. All
    layers if a config with fewer gives other ones, as where the last layers share their keys."""
    whole = skeleton_of(config)
    kinds = [_kind(layer) for _, layer in decoder_layers(whole)]
    layers = max(min(2, len(kinds)), *(kinds.index(kind) + 1 for kind in kinds))
    shorter = _shortened(config, layers)
    part = skeleton_of(shorter)
    if [_kind(layer) for _, layer in decoder_layers(part)] != kinds[:layers]:
        shorter, part, layers = config, whole, len(kinds)
    weights = sum(parameter.numel() for parameter in part.parameters())
    return shorter, layers, int(_COPIES * weights * torch.float32.itemsize)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells one kind of layer from another: classes, shapes and plain attributes."""
    plain, kind = (int, float, str, type(None)), list[object]()
    for name, module in layer.named_modules():
        kind += [name, type(module)]
        kind += [(key, p.shape) for key, p in module._parameters.items() if p is not None]
        values = sorted(vars(module).items())
        kind += [(k, v) for k, v in values if isinstance(v, plain) and k not in _NUMBERS]
    return tuple(kind)


def _shortened(config: Any, layers: int) -> Any:
    """A copy with so many layers; lists that have an entry for each are cut."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return shorter


def _sequences(config: Any) -> list[_Sequence]:
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    limit = min(limit, _FARTHEST)
    rows = min(_ROWS, limit)
    starts = dict.fromkeys((0, (limit - rows) // 2, limit - rows))
    if getattr(text, "attn_temperature_tuning", False):
        starts = {0: None}  # Llama 4's own code counts rows there, not positions
    sequences: list[_Sequence] = []
    for first in starts:
        for length in (rows, min(_FEWER, rows)):
            offset = 101 * len(sequences) + 1
            ids = [(number * 7919 + offset) % text.vocab_size for number in range(length)]
            sequences.append(_Sequence(ids, range(first, first + length)))
    return sequences


@torch.inference_mode()
def _of_library(
    module: Any, ids: list[int], positions: range, device: torch.device
) -> torch.Tensor:
    tokens, at = (torch.tensor([list(values)], device=device) for values in (ids, positions))
    logits: torch.Tensor = module(input_ids=tokens, position_ids=at, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def _furthest(
    model: CausalModel, sequences: Sequence[_Sequence], wanted: Sequence[torch.Tensor]
) -> tuple[float, int]:
    """How far logits are off at most, in spreads of a row, and at which position, in a batch of the
    first rows of all sequences and in one of the others."""
    cache = model.new_cache(len(sequences), _ROWS, share=False)
    for number, s in enumerate(sequences):
        cache.admit(number, range(s.positions.stop))  # as long as the text that it ends
        cache.reserve(number, len(s.ids))
    cuts, ends = [-(-2 * len(s.ids) // 3) for s in sequences], [len(s.ids) for s in sequences]
    worst = (0.0, 0)
    for firsts, lasts in (([0] * len(cuts), cuts), (cuts, ends)):
        runs = [slice(*run) for run in zip(firsts, lasts, strict=True)]
        parts = list(zip(sequences, runs, strict=True))
        spans = [Span.of(n, run.start, s.ids[run]) for n, (s, run) in enumerate(parts)]
        positions = [position for s, run in parts for position in s.positions[run]]
        batch = replace(cache.batch_of(spans), positions=positions, logit_rows=None)
        theirs = torch.cat([rows[run] for rows, run in zip(wanted, runs, strict=True)]).float()
        off = (model(batch, cache).logits.float() - theirs).abs().amax(-1)
        spreads = (off / theirs.std(-1).clamp_min(1e-6)).nan_to_num(torch.inf)
        worst = max(worst, *zip(spreads.tolist(), positions, strict=True))
    return worst
