"""Compares the engine's logits with those of transformers on the checkpoint itself: on the first
layers up to one of each kind, with the embedding and the head, in float32. Short sequences lie at
the start, in the middle and at the end of the context. Transformers runs them one by one, the
engine on torch in ragged batches and in two chunks. (Loading compares the native kernels with the
engine on torch.)"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from paceline.model.backends.base import REFERENCE
from paceline.model.loading import check_architecture, load_module, read_config, resolve_device
from paceline.model.names import first_line
from paceline.model.offload import decoder_layers
from paceline.model.precision import quantization_of
from paceline.model.target import UNLIMITED_POSITIONS, CausalModel

_LENGTHS = 32, 13  # tokens of the two sequences at each position
# Tolerance, in standard deviations of a row's logits. With random models rounding reaches 2e-4.
_LIMIT = 2e-3
_COPIES = 2.5  # copies of the weights at the peak: as loaded, and in a backend's layout
_MAX_POSITION = 1 << 17  # of those compared: tables of more positions take too long to compute
_LAYER_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx"}


class _Sequence(NamedTuple):
    """Token ids and their consecutive positions."""

    ids: list[int]
    positions: range


def check_logits(target: str, *, device: str = "auto") -> Finding:
    """Compare the engine's logits with transformers' on some layers of a model. The finding is an
    error if they differ or the model is refused, and a note if they cannot be compared. Raises
    ModelLoadError (no such model) and ConfigError (an unusable device)."""
    resolved, files = resolve_device(device), read_files(target)
    limit_threads()
    try:
        compared = _compared_with_transformers(files, resolved)
    except (ModelLoadError, UnsupportedModelError) as error:
        compared = refusal("architecture-refused", error)
    return replace(compared, about="target")


def _compared_with_transformers(files: ModelFiles, device: torch.device) -> Finding:
    name = files.name
    unchecked = partial(finding, "logits-unchecked")
    if files.remote:
        return unchecked(why="the weights are not on this machine")
    config = read_config(name, str(files.folder))
    check_architecture(config)
    options = quantization_of(config)
    if options is not None and files.gguf is None:
        method = options.get("quant_method")
        return unchecked(why=f"single layers of a {method} checkpoint cannot be loaded")
    try:
        config, layers, needed = _some_layers(config)
    except Exception as error:  # the code of an architecture may raise anything
        return unchecked(why=f"the config gives no model ({first_line(error)})")
    free = free_memory(device)
    if needed > free:
        takes = f"{layers} layers, embedding and head take {size(needed)} in float32"
        return unchecked(why=f"{takes}, but {size(free)} of memory are free")
    with stage(f"comparing {name} with transformers"):
        module = load_module(name, "float32", device, "eager", config=config)
        sequences = _sequences(config)
        try:
            expected = [_library_logits(module, *sequence, device) for sequence in sequences]
        except Exception as error:  # a model's own code may raise anything
            return unchecked(why=f"the forward of transformers fails ({first_line(error)})")
        model = CausalModel.from_module(module, name, REFERENCE)
        spreads, position = _largest_error(model, sequences, expected)
    if spreads > _LIMIT:
        return finding("logits-differ", position=position, spreads=spreads, layers=layers)
    runs = dict.fromkeys((s.positions[0], s.positions[-1]) for s in sequences[::2])
    positions = ", ".join(f"{first:,} to {last:,}" for first, last in runs)
    return finding("logits-equal", spreads=spreads, positions=positions, layers=layers)


def _some_layers(config: Any) -> tuple[Any, int, int]:
    """The config of the first layers, their number, and the bytes that the comparison needs: of all
    layers if fewer in the config would change them, as in models whose last layers share keys."""
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
    """What distinguishes kinds of layers: classes, shapes and plain attributes."""
    plain, kind = (int, float, str, type(None)), list[object]()
    for name, module in layer.named_modules():
        kind += [name, type(module)]
        kind += [(key, p.shape) for key, p in module._parameters.items() if p is not None]
        values = sorted(vars(module).items())
        kind += [(k, v) for k, v in values if isinstance(v, plain) and k not in _LAYER_NUMBERS]
    return tuple(kind)


def _shortened(config: Any, layers: int) -> Any:
    """A copy of the config with ``layers`` layers; lists with one entry per layer are cut."""
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
    lengths = [min(length, limit, _MAX_POSITION) for length in _LENGTHS]
    last = min(limit, _MAX_POSITION) - lengths[0]
    starts = dict.fromkeys((0, last // 2, last))
    if getattr(text, "attn_temperature_tuning", False):
        starts = {0: None}  # the code of Llama 4 uses row numbers instead of positions there
    sequences: list[_Sequence] = []
    for first in starts:
        for length in lengths:
            offset = 101 * len(sequences) + 1
            ids = [(number * 7919 + offset) % text.vocab_size for number in range(length)]
            sequences.append(_Sequence(ids, range(first, first + length)))
    return sequences


@torch.inference_mode()
def _library_logits(
    module: Any, ids: list[int], positions: range, device: torch.device
) -> torch.Tensor:
    tokens, at = (torch.tensor([list(values)], device=device) for values in (ids, positions))
    logits: torch.Tensor = module(input_ids=tokens, position_ids=at, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def _largest_error(
    model: CausalModel, sequences: Sequence[_Sequence], expected: Sequence[torch.Tensor]
) -> tuple[float, int]:
    """The largest error of the logits, in standard deviations of a row, and its position. The
    sequences are run in two batches, of their first and of their last tokens."""
    cache = model.new_cache(len(sequences), _LENGTHS[0], share=False)
    for number, s in enumerate(sequences):
        cache.admit(number, range(s.positions.stop))  # of the length of the whole text
        cache.reserve(number, len(s.ids))
    cuts, ends = [-(-2 * len(s.ids) // 3) for s in sequences], [len(s.ids) for s in sequences]
    worst = (0.0, 0)
    for firsts, lasts in (([0] * len(cuts), cuts), (cuts, ends)):
        runs = [slice(*run) for run in zip(firsts, lasts, strict=True)]
        parts = list(zip(sequences, runs, strict=True))
        spans = [Span.of(n, run.start, s.ids[run]) for n, (s, run) in enumerate(parts)]
        positions = [position for s, run in parts for position in s.positions[run]]
        batch = replace(cache.batch_of(spans), positions=positions, logit_rows=None)
        theirs = torch.cat([rows[run] for rows, run in zip(expected, runs, strict=True)]).float()
        error = (model(batch, cache).logits.float() - theirs).abs().amax(-1)
        spreads = (error / theirs.std(-1).clamp_min(1e-6)).nan_to_num(torch.inf)
        worst = max(worst, *zip(spreads.tolist(), positions, strict=True))
    return worst
