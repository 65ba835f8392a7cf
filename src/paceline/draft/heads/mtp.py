"""MTP (multi-token prediction): a layer in the target's checkpoint predicts one token further.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): h is the target's last output at position i, e the
embedding of token i + 1. ``x = M [norm(e); norm(h)]`` passes one decoder layer and a norm; the
target's head turns the result into logits of token i + 2. For the next token, the layer's output
takes the place of h, as in an EAGLE head. transformers does not load these weights, so they are
read from the checkpoint's files::

    DeepSeek-V3, GLM-4.x   model.layers.{layers}.*: enorm, hnorm, eh_proj, shared_head.norm, and a
                           decoder layer of the target's kind
    Qwen3-Next             mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}, mtp.layers.0.*
    MiMo                   model.mtp_layers.0.*: token_layernorm, hidden_layernorm, input_proj (of
                           [norm(h); norm(e)]), final_layernorm; MiMo-V2: model.mtp.layers.0.*

If there are several such layers, the first one drafts all tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from paceline.core.batch import Batch
from paceline.core.bound import bound
from paceline.draft.base import Drafter
from paceline.draft.heads.eagle import MIN_LEVEL_PROB, EagleDrafter
from paceline.draft.heads.features import QUANTIZE, feature_drafter, ready_head
from paceline.draft.spec import (
    DraftContext,
    DraftInfo,
    LoadContext,
    PreparedDraft,
    Target,
    TreeSpec,
    option,
)
from paceline.errors import ModelLoadError
from paceline.model.backends.base import EagleStep
from paceline.model.backends.reference.attention import STEP
from paceline.model.loading import causal_class, check_folder, quiet
from paceline.model.names import first_line, model_path, weight_files
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.segments import AttentionStep
from paceline.model.precision import dense_tensors
from paceline.model.probe import ATTENTION
from paceline.model.quantised.formats import check_fields, is_supported
from paceline.model.target import CausalModel
from paceline.model.tensorfile import Entry, check_finite, load_tensors, read_table

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(mtp\.|mtp_)?layers\.(\d+)\.(.+)")
_OUTSIDE_LAYER = re.compile(r"(?:model\.)?mtp\.(.+)")  # Qwen3-Next's weights around its layer
# The parts around the decoder layer: our name -> their names in checkpoints.
_PARTS = {
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "eh_proj": ("eh_proj", "fc", "input_proj"),
    "model.norm": ("shared_head.norm", "norm", "final_layernorm"),
}
_PART = {name: part for part, names in _PARTS.items() for name in names}
_HIDDEN_FIRST = ".input_proj"
_COPIES = ("embed_tokens", "shared_head.head")  # copies of the target's weights
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = "model.layers.0."


@dataclass(frozen=True)
class Mtp(TreeSpec):
    """The target's own MTP layer; chains. ``path``: another checkpoint that holds it."""

    kind = "mtp"
    default_draft_length = 2
    acceptance: ClassVar[tuple[float, ...]] = (0.8, 0.6)
    weights = "mtp"
    examples: ClassVar[tuple[str, ...]] = ("mtp:{mtp},branching=2x1",)

    path: str | None = option(None)
    _: KW_ONLY
    quantize: str = option("int8", choices=QUANTIZE)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        target = loading.target
        head = ready_head(load_mtp(self.path or target.name, target), target, self.quantize)
        step = MtpStep(target.backend.packed(head), target)
        shapes, switch = step.head.model.cache_shapes, step.head.model.rope_switch

        def make(context: DraftContext, cache: PagedCache) -> Drafter:
            return EagleDrafter(step, self.growth_settings(context, cache, MIN_LEVEL_PROB))

        return feature_drafter(target, shapes, 1, make, switch)

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        name = self.path or str(getattr(target, "name", ""))
        weights = _found(name, target.num_layers)
        bytes_ = sum(weight.entry.nbytes for weight in weights)
        return self.report("head-fits", f"an MTP layer of {bytes_ / 1e6:,.1f} MB in {name}")


class MtpWeight(NamedTuple):
    """A tensor of an MTP layer: its file, its name there and that in a model of one layer."""

    file: Path
    key: str
    name: str
    entry: Entry


def mtp_weights(model: str, layers: int) -> Iterator[MtpWeight]:
    """The tensors of the first MTP layer, if any, in the files of a model with so many layers.
    Raises ModelLoadError for damaged files."""
    tables = {file: read_table(file) for file in weight_files(Path(model_path(model)))}
    names = mtp_names(chain.from_iterable(tables.values()), layers)
    for file, entries in tables.items():
        for key, entry in entries.items():
            if key in names:
                yield MtpWeight(file, key, names[key], entry)


def mtp_names(keys: Iterable[str], layers: int) -> dict[str, str]:
    """Key -> name in a model of one layer, for the tensors of the first MTP layer. Empty without a
    projection of features and embeddings: then these are layers that the config leaves out."""
    names = {key: name for key in keys if (name := _mtp_name(key, layers)) is not None}
    return names if any(name.startswith("eh_proj.") for name in names.values()) else {}


def _mtp_name(key: str, layers: int) -> str | None:
    """A tensor's name in a model of one layer; None if it is not part of an MTP layer."""
    match, outside = _LAYER.fullmatch(key), _OUTSIDE_LAYER.fullmatch(key)
    if match is not None:
        rest = match[3].removeprefix("mtp_block.")
        if int(match[2]) != (0 if match[1] else layers):
            return None
    elif outside is not None:
        rest = outside[1]
    else:
        return None
    part, _, ending = rest.rpartition(".")
    return None if part in _COPIES else f"{_PART.get(part, _BLOCK + part)}.{ending}"


def _found(model: str, layers: int) -> list[MtpWeight]:
    """``mtp_weights``; raises ModelLoadError if there are none."""
    if weights := list(mtp_weights(model, layers)):
        return weights
    raise ModelLoadError(
        f"{model} has no MTP layer: its files hold neither mtp.* nor model.layers.{layers}.*; "
        "name a checkpoint that has one (mtp:PATH), or another draft"
    )


class MtpHead(nn.Module):
    """``model``: the decoder layer as a model of one layer, whose embedding and head are unused."""

    def __init__(self, model: CausalModel, target: Target, hidden_first: bool) -> None:
        super().__init__()
        self.model, self._hidden_first = model, hidden_first
        self._decoder = model.hf.get_decoder()
        size = target.hidden_size
        self.config = SimpleNamespace(  # what the EAGLE drafter asks of a head's configuration
            hidden_size=size,
            columns=target.vocab_size,
            feature_layers=(target.num_layers,),
            max_positions=target.max_positions,
            reduced=False,
        )
        self.enorm, self.hnorm = (copy.deepcopy(self._decoder.norm) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Outputs ``[T, H]`` for the target's head, from the embeddings of the next tokens ``[T,
        H]`` and the target's or earlier outputs ``[T, H]``."""
        parts = self.enorm(embeds), self.hnorm(hidden)
        inputs = self.eh_proj(torch.cat(parts[::-1] if self._hidden_first else parts, -1))
        with bound(STEP, step):
            out = self._decoder(
                inputs_embeds=inputs[None], position_ids=step.batch.positions[None], use_cache=False
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]


class MtpStep(EagleStep):
    """Runs an MTP layer with the target's embedding and head."""

    head: MtpHead

    def __init__(self, head: MtpHead, target: CausalModel) -> None:
        super().__init__(head, target.embedding("input"))
        self._project = target.head

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = AttentionStep.of(batch, cache, self.head.model.patterns, device=cache.device)
        rows = step.batch
        outputs = self.head(self._embed(rows.input_ids), hidden, step)
        if rows.logit_rows is not None:
            outputs = outputs.index_select(0, rows.logit_rows)
        return outputs, self._project(outputs) if len(outputs) else outputs


def load_mtp(name: str, target: CausalModel) -> MtpHead:
    """Load the first MTP layer in the files of ``name``, on the target's device and in its dtype.
    Raises ModelLoadError, and UnsupportedModelError for a recurrent layer."""
    weights = _found(name, target.num_layers)
    tensors = _dequantised(name, weights, target.num_layers, target.dtype)
    check_finite(tensors, f"the MTP layer of {name} cannot be used")
    around = {part: tensors.pop(f"{part}.weight", None) for part in ("enorm", "hnorm", "eh_proj")}
    model = _one_layer(name, target, tensors)
    hidden_first = any(weight.key.rpartition(".")[0].endswith(_HIDDEN_FIRST) for weight in weights)
    head = MtpHead(model, target, hidden_first)
    for part, tensor in around.items():
        module = head.get_submodule(part)
        if tensor is None or tensor.shape != module.weight.shape:
            raise _misfit(name, f"{part} {'is missing' if tensor is None else list(tensor.shape)}")
        module.weight = nn.Parameter(tensor.to(target.device, target.dtype), requires_grad=False)
    return head.eval().requires_grad_(False)


def _dequantised(
    name: str, weights: list[MtpWeight], layers: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors, by their names in a model of one layer. Raises ModelLoadError."""
    stored: dict[str, torch.Tensor] = {}
    for file in {weight.file for weight in weights}:
        stored |= load_tensors(file, [weight.key for weight in weights if weight.file == file])
    options = check_folder(name, Path(model_path(name))).get("quantization_config")
    if isinstance(options, dict) and is_supported(options, floats=True):
        check_fields(name, options)
        stored, _ = dense_tensors(stored, options, dtype)
    if packed := next((key for key, t in stored.items() if t.dtype not in _FLOATS), None):
        raise ModelLoadError(
            f"the MTP layer of {name} is quantised ({packed} is {stored[packed].dtype}), in a form "
            "that is not read; use another draft"
        )
    return {str(_mtp_name(key, layers)): tensor for key, tensor in stored.items()}


def _one_layer(name: str, target: CausalModel, tensors: dict[str, torch.Tensor]) -> CausalModel:
    """The decoder layer as a model of the target's architecture with one layer."""
    config = copy.deepcopy(target.hf.config.get_text_config(decoder=True))
    count = config.num_hidden_layers
    by_layer = [k for k, v in vars(config).items() if isinstance(v, list) and len(v) == count]
    kept = {key: getattr(config, key)[-1:] for key in by_layer}
    kept["layer_types"] = getattr(config, "mtp_layer_types", None) or kept.get("layer_types")
    unused = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    for key, value in (kept | unused | {"num_hidden_layers": 1, "vocab_size": 4}).items():
        if hasattr(config, key):
            setattr(config, key, value)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # a mixture of experts, like the target's last layer
    vars(config).pop("quantization_config", None)
    loader: Any = causal_class(config)
    try:
        with quiet():
            module, info = loader.from_pretrained(
                None,
                state_dict=tensors,
                config=config,
                dtype=target.dtype,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise _misfit(name, first_line(error)) from None
    problems = {
        "is missing": [
            k for k in info["missing_keys"] if k.startswith(("model.layers", "model.norm"))
        ],
        "is unknown": info["unexpected_keys"],
        "has another shape": [key for key, *_ in info["mismatched_keys"]],
    }
    for what, keys in problems.items():
        if keys:
            raise _misfit(name, f"{min(keys)} {what}")
    return CausalModel(module.to(target.device), name)


def _misfit(name: str, problem: str) -> ModelLoadError:
    return ModelLoadError(
        f"the MTP layer of {name} does not fit the target: {problem}; use another draft"
    )
