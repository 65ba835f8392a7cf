"""Whether the engine computes what transformers does, on the checkpoint itself.

The shortest run of first layers that has a layer of each kind, with the embedding and the head, is
loaded in float32. Short sequences begin at the start, in the middle and at the end of the context;
transformers runs each alone with its eager attention, the engine on torch all of them in ragged
batches and in two pieces. The native kernels take a position for a place among a sequence's keys:
they are compared with transformers at the start and, behind keys that repeat, with the engine on
torch at the other places. All logits must be equal to rounding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.batch import Batch, Span
from paceline.core.memory import free_memory, limit_threads
from paceline.core.stages import stage
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.lab.doctor.files import read_files
from paceline.lab.doctor.findings import Finding, finding, parted
from paceline.lab.doctor.machine import size
from paceline.model.backends.base import NATIVE, REFERENCE
from paceline.model.backends.trial import trial_logits, trial_starts
from paceline.model.loading import check_architecture, load_module, read_config, resolve_device
from paceline.model.offload import decoder_layers
from paceline.model.paged.cache import PagedCache
from paceline.model.precision import quantization_of
from paceline.model.probe import ATTENTION
from paceline.model.target import UNLIMITED_POSITIONS, CausalModel
from paceline.model.tokenizer import first_line

_ROWS, _FEWER = 32, 13  # of the two sequences at each place
_LIMIT = 2e-3  # of the spread of a row's logits; of random models rounding takes up to 2e-4
_COPIES = 2.5  # of the weights at the peak: as loaded, and as a backend lays them out
_FARTHEST = 1 << 17  # positions that are compared: tables of more take too long to make
_BEHIND = 1 << 16  # of those, which are tried behind as many keys
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx"}
_NAMES = {REFERENCE: "torch", NATIVE: "the native kernels"}


@dataclass(frozen=True)
class _Sequence:
    """``ids`` and ``positions``: int64 ``[rows]``; the positions follow each other."""

    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class _Apart:
    """How far a backend's logits are off at most, in spreads of a row, and at which position."""

    most: float
    position: int


def check_logits(target: str, *, device: str = "auto", backend: str = "auto") -> Finding:
    """Compare the engine's logits with transformers' on some layers of a model.

    Arguments as of ``LLM``. What is refused, or differs, is an error among the findings; what
    cannot be compared here is a note. Raises ModelLoadError if there is no such model, ConfigError
    on an unusable device.
    """
    device_used, files, start = resolve_device(device), read_files(target), time.monotonic()
    limit_threads()
    if files.remote:
        return _unchecked("the weights are not on this machine")
    try:
        config = read_config(files.name, str(files.folder))
        check_architecture(config)
        options = quantization_of(config)
        if options is not None and files.gguf is None:
            method = options.get("quant_method")
            return _unchecked(f"layers of a checkpoint in {method} are not read by themselves")
        try:
            config, layers, needed = _some_layers(config)
        except Exception as error:  # whatever the code of an architecture raises
            return _unchecked(f"no model is built of the config ({first_line(error)})")
        free = free_memory(device_used)
        if needed > free:
            memory = f"{layers} layers, embedding and head take {size(needed)} in float32"
            return _unchecked(f"{memory}, but {size(free)} of memory are free")
        with stage(f"comparing {target} with transformers", total=4) as begun:
            module = load_module(target, "float32", device_used, "eager", config=config)
            begun.advance(1, "transformers' logits")
            sequences = _sequences(config, device_used)
            try:
                wanted = _of_library(module, sequences)
            except Exception as error:  # whatever a model's own code raises
                return _unchecked(f"transformers' own forward fails ({first_line(error)})")
            begun.advance(1, f"on {_NAMES[REFERENCE]}")
            model = _adapted(module, target, REFERENCE)
            apart = {REFERENCE: _compared(model, sequences, wanted)}
            right = apart[REFERENCE].most <= _LIMIT  # else there is nothing to hold kernels to
            if right and backend != REFERENCE and device_used.type == "cpu":
                behind = _behind(model)
                del model  # never two laid-out copies at a time
                begun.advance(1, f"on {_NAMES[NATIVE]}")
                model = _adapted(module, target, NATIVE)
                if model.backend.name == NATIVE:
                    near = _compared(model, sequences[:2], wanted[:2])
                    far = _furthest(_behind(model), behind, trial_starts(model, _BEHIND))
                    apart[NATIVE] = max(near, far, key=lambda difference: difference.most)
    except (ModelLoadError, UnsupportedModelError) as error:
        problem, cure = parted(error)
        return finding("architecture-refused", "target", problem, cure=cure)
    seconds = time.monotonic() - start
    return _judged(apart, sequences, f"{layers} layers, {seconds:.1f} s")


def _unchecked(why: str) -> Finding:
    return finding("logits-unchecked", "target", f"logits are not compared: {why}")


def _judged(apart: dict[str, _Apart], sequences: Sequence[_Sequence], how: str) -> Finding:
    worst = max(apart, key=lambda backend: apart[backend].most)
    difference = apart[worst]
    if difference.most <= _LIMIT:
        runs = dict.fromkeys((int(s.positions[0]), int(s.positions[-1])) for s in sequences[::2])
        places = ", ".join(f"{first:,} to {last:,}" for first, last in runs)
        ways = " and ".join(_NAMES[backend] for backend in apart)
        text = (
            f"the engine's logits equal transformers' to {difference.most:.0e} of their spread at "
            f"positions {places} ({ways}; {how})"
        )
        return finding("logits-equal", "target", text)
    text = (
        f"on {_NAMES[worst]} the logits of position {difference.position:,} are "
        f"{difference.most:.2g} of "
        f"their spread off transformers' ({how})"
    )
    cure = "Use --backend reference, and report this line." if worst == NATIVE else None
    return finding("logits-differ", "target", text, cure=cure)


# -- layers ------------------------------------------------------------------------------------


def _some_layers(config: Any) -> tuple[Any, int, int]:
    """The config of the first layers, how many they are, and the memory that comparing takes.

    All layers where a config with fewer would not give the first ones as they are, as of models
    whose last layers share their keys.
    """
    whole = _skeleton(config)
    kinds = [_kind(layer) for _, layer in decoder_layers(whole)]
    layers = max(kinds.index(kind) for kind in set(kinds)) + 1
    layers = max(layers, min(2, len(kinds)))
    shorter = _shortened(config, layers)
    part = _skeleton(shorter)
    if [_kind(layer) for _, layer in decoder_layers(part)] != kinds[:layers]:
        shorter, part, layers = config, whole, len(kinds)
    weights = sum(parameter.numel() for parameter in part.parameters())
    return shorter, layers, int(_COPIES * weights * torch.float32.itemsize)


def _skeleton(config: Any) -> nn.Module:
    """The module that transformers builds of a config, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    built: nn.Module = module
    return built


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells one kind of layer from another: classes, shapes and plain attributes."""
    plain = (int, float, str, type(None))
    return tuple(
        (
            name,
            type(module).__name__,
            *((key, p.shape) for key, p in module._parameters.items() if p is not None),
            *(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, plain) and key not in _NUMBERS
            ),
        )
        for name, module in layer.named_modules()
    )


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


# -- logits ------------------------------------------------------------------------------------


def _sequences(config: Any, device: torch.device) -> list[_Sequence]:
    """Two of different length at each place, the longer one first."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    limit = min(limit, _FARTHEST)
    rows = min(_ROWS, limit)
    places = dict.fromkeys((0, (limit - rows) // 2, limit - rows))
    if getattr(text, "attn_temperature_tuning", False):
        places = {0: None}  # Llama 4's own code counts rows there, not positions
    sequences: list[_Sequence] = []
    for first in places:
        for length in (rows, min(_FEWER, rows)):
            numbers = torch.arange(length, device=device)
            ids = (numbers * 7919 + 101 * len(sequences) + 1) % text.vocab_size
            sequences.append(_Sequence(ids, numbers + first))
    return sequences


@torch.inference_mode()
def _of_library(module: Any, sequences: Sequence[_Sequence]) -> list[torch.Tensor]:
    """Logits ``[rows, vocab]`` of each sequence alone."""
    return [
        module(input_ids=s.ids[None], position_ids=s.positions[None], use_cache=False).logits[0]
        for s in sequences
    ]


def _adapted(module: Any, name: str, backend: str) -> CausalModel:
    """The same weights as engines take them. Raises UnsupportedModelError."""
    weights: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, weights)
    copied.set_attn_implementation(ATTENTION)
    model = CausalModel(copied, name)
    model.asked = backend
    return model.optimised()


@torch.inference_mode()
def _compared(
    model: CausalModel, sequences: Sequence[_Sequence], wanted: Sequence[torch.Tensor]
) -> _Apart:
    """All sequences in a batch of their first rows, then in one of the others."""
    cache = PagedCache(model.cache_shapes, len(sequences), _ROWS, model.dtype, model.device)
    cuts = [-(-2 * len(s.ids) // 3) for s in sequences]
    ends = [len(s.ids) for s in sequences]
    differences = []
    for firsts, lasts in (([0] * len(cuts), cuts), (cuts, ends)):
        runs = [slice(*run) for run in zip(firsts, lasts, strict=True)]
        logits = model(_batch(model, sequences, runs), cache).logits
        ours = torch.split(logits, [run.stop - run.start for run in runs])
        theirs = [rows[run] for rows, run in zip(wanted, runs, strict=True)]
        starts = [int(s.positions[0]) + run.start for s, run in zip(sequences, runs, strict=True)]
        differences.append(_furthest(ours, theirs, starts))
    return max(differences, key=lambda apart: apart.most)


@torch.inference_mode()
def _behind(model: CausalModel) -> tuple[torch.Tensor, ...]:
    return trial_logits(model, longest=_BEHIND)


def _furthest(
    got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], starts: Sequence[int]
) -> _Apart:
    """Of logits ``[rows, vocab]`` of sequences whose first rows are at ``starts``."""
    worst = _Apart(0.0, 0)
    for ours, theirs, start in zip(got, wanted, starts, strict=True):
        off = (ours.float() - theirs.float()).abs().amax(-1)
        off /= theirs.float().std(-1).clamp_min(1e-6)
        for position, apart in enumerate(off.nan_to_num(torch.inf).tolist(), start):
            worst = max(worst, _Apart(apart, position), key=lambda difference: difference.most)
    return worst


def _batch(model: CausalModel, sequences: Sequence[_Sequence], runs: Sequence[slice]) -> Batch:
    """Some rows of each sequence, which has one block of the cache."""
    switch, spans, start = model.rope_switch, [], 0
    ids, positions, slots = list[int](), list[int](), list[int]()
    for block, (s, run) in enumerate(zip(sequences, runs, strict=True)):
        long = switch is not None and int(s.positions[-1]) >= switch
        rows = run.stop - run.start
        spans.append(Span(block, start, run.start, rows, long=long))
        ids += s.ids[run].tolist()
        positions += s.positions[run].tolist()
        slots += range(block * _ROWS + run.start, block * _ROWS + run.stop)
        start += rows
    return Batch(ids, positions, slots, tuple(spans), tuple((n,) for n in range(len(spans))))
