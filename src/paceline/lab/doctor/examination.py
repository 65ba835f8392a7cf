"""All checks on a target and its drafts, from their small files and headers alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.draft.auto import Auto
from paceline.draft.model import DraftModel
from paceline.draft.spec import DraftSpec, Examined
from paceline.drafters import parse_draft
from paceline.lab.doctor.chats import check_chat, check_ends
from paceline.lab.doctor.files import ModelFiles, read_files
from paceline.lab.doctor.findings import ERROR, NOTE, Finding, by_severity, finding
from paceline.lab.doctor.heads import another_kind, check_head, noted, weights_kind_of
from paceline.lab.doctor.machine import (
    DeviceSettings,
    MemoryNeeds,
    check_dtype,
    check_memory,
    check_offload,
    size,
)
from paceline.lab.doctor.models import Model, check_tensors, describe, millions
from paceline.lab.doctor.precision import (
    Rounding,
    check_kernels,
    check_precision,
    composed_draft,
    held_bits,
    rounded_bytes,
    weight_bytes,
)
from paceline.lab.doctor.tokens import compare
from paceline.lab.doctor.weights import check_files, check_padding, check_tied, check_values
from paceline.model.backends.base import REFERENCE
from paceline.model.offload import plan_offload
from paceline.model.quantised.weights import BITS
from paceline.parallel.load import check_shareable

_SMALLER, _SMALL_ENOUGH = 4, 10  # times smaller than the target: at least, and better
_DEEP, _DEEPISH = 1 / 2, 1 / 4  # of the target's layers


_Draft = tuple[DraftSpec, ModelFiles | None]  # with what its folder holds


@dataclass(frozen=True)
class _Cost:
    """What a model or head takes of memory. ``loading``: of it while it is read, the pages of its
    files included, which stand beside its numbers then."""

    weights: int = 0
    cache_bytes: int = 0
    feature_bytes: int = 0
    loading: int = 0

    @classmethod
    def of(cls, size: Examined, setting: DeviceSettings, stored: int) -> _Cost:
        width = (setting.dtype or torch.bfloat16).itemsize
        weights, loading = width * size.parameters, stored + width * size.parameters
        return cls(weights, width * size.cache_values, width * size.feature_values, loading)

    @classmethod
    def of_model(
        cls,
        model: Model,
        setting: DeviceSettings,
        rounding: Rounding,
        cached: torch.dtype | None,
    ) -> _Cost:
        """``cached``: what its keys and values are held in."""
        loading = model.files.stored_bytes + model.weight_bytes(setting.dtype)
        weights = weight_bytes(model, setting, rounding)
        return cls(weights, model.cache_bytes(cached), 0, loading)

    def __add__(self, other: _Cost) -> _Cost:
        """With another one, which is loaded after it."""
        return _Cost(
            self.weights + other.weights,
            self.cache_bytes + other.cache_bytes,
            self.feature_bytes + other.feature_bytes,
            max(self.loading, self.weights + other.loading),
        )

    def shared(self, ranks: int) -> _Cost:
        """What one of so many ranks takes."""
        return _Cost(self.weights // ranks, self.cache_bytes // ranks, 0, self.loading // ranks)


def examine(
    target: str,
    draft: str | Sequence[str] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch_size: int = 8,
    kv_cache_memory: int | None = None,
    quantize: str | None = None,
    draft_quantize: str | None = None,
    backend: str = "auto",
    offload: str | None = None,
    weights_memory: int | None = None,
    tensor_parallel: int = 1,
    kv_cache_dtype: str = "auto",
) -> list[Finding]:
    """Look at a target and its draft or drafts before they are loaded; the worst comes first.

    Arguments as of ``LLM``. Reads config.json, tokenizers, headers and samples of the weights: a
    second's work for a model of any size. Of a hub name that is not on this machine the small
    files are fetched. What is wrong with the models is a finding; what is wrong with the
    arguments raises ModelLoadError (no such folder, no config.json, unreadable JSON) or
    ConfigError (an unknown option of a draft, an unusable device or dtype), in one line.
    """
    texts = [draft] if draft is None or isinstance(draft, str) else list(draft)
    specs = [spec for text in texts for spec in parse_draft(text).members()]
    run = backend if offload is None and tensor_parallel == 1 else REFERENCE
    setting = DeviceSettings.of(dtype, device, max_batch_size, kv_cache_memory, kv_cache_dtype, run)
    quantize = None if quantize == "none" else quantize
    rounding = Rounding(quantize, draft_quantize, backend)
    files = read_files(target)
    if tensor_parallel > 1:
        check_shareable(target, tensor_parallel)
    drafts = [(spec, _folder_of(spec)) for spec in specs]  # bad paths are errors before all else
    model, findings = describe(files, "target")
    findings += check_files(files, "target")
    if model is None:
        return by_severity(findings)
    findings += [*check_tensors(model), *check_values(files, "target"), *check_padding(model)]
    findings += [*check_tied(model), *check_chat(model), *check_ends(model)]
    ranks = tensor_parallel if setting.device.type == "cuda" else 1  # a processor is all ranks'
    findings += check_precision(model, setting, rounding)
    cost = _Cost.of_model(model, setting, rounding, setting.cache_dtype).shared(ranks)
    beside = setting  # what a draft is loaded beside
    if offload is not None:
        plan = plan_offload(target, dtype, device, offload, weights_memory)
        findings.append(check_offload(plan, offload))
        cost = replace(cost, weights=plan.peak, loading=0)
        beside = replace(setting, kernels=setting.has_kernels(backend))  # its 4-bit form is there
    noticed, cost = _drafts(drafts, model, beside, rounding, cost)
    findings += noticed
    findings += check_dtype(setting, cost.weights)
    few = any(one.code.startswith("quantised") for one in findings)
    findings.append(check_kernels(setting, rounding, few))
    needs = (cost.weights, cost.cache_bytes, model.max_positions, cost.feature_bytes)
    load = MemoryNeeds(*needs, loading=cost.loading)
    return by_severity([*findings, check_memory(setting, load)])


# The settings of an engine that decide what is found, as keywords.
SETTINGS = frozenset(inspect.signature(examine).parameters) - {"target", "draft"}


def _folder_of(spec: DraftSpec) -> ModelFiles | None:
    """What a spec's folder holds. Raises ModelLoadError."""
    path = spec.argument()
    if spec.holds == "nothing" or path is None:
        return None
    return read_files(path, *([spec.weight_files] if spec.weight_files else []))


def _drafts(
    drafts: Sequence[_Draft], model: Model, setting: DeviceSettings, rounding: Rounding, cost: _Cost
) -> tuple[list[Finding], _Cost]:
    """Findings on all of them, and ``cost`` with theirs; ``auto`` is what it is composed of."""
    findings: list[Finding] = []
    if any(isinstance(spec, Auto) for spec, _ in drafts):
        composed = composed_draft(model, setting, rounding, cost.weights)
        failed: dict[DraftSpec, str] = {}
        for spec, _ in composed.taken:
            noticed, _ = _draft(spec, _folder_of(spec), model, setting, rounding)
            wrong = [one.found for one in noticed if one.severity is ERROR]
            failed |= {spec: wrong[0]} if wrong else {}
        composed = composed.without(failed)  # as when they are loaded
        findings.append(finding("draft-auto", "draft", composed.line()))
        named = [pair for pair in drafts if not isinstance(pair[0], Auto)]
        drafts = [*((spec, _folder_of(spec)) for spec, _ in composed.taken), *named]
    for number, (spec, folder) in enumerate(drafts, 1):
        noticed, more = _draft(spec, folder, model, setting, rounding)
        about = "draft" if len(drafts) == 1 else f"draft {number} ({spec.kind})"
        findings += [replace(f, about=about) if f.about == "draft" else f for f in noticed]
        cost += more
    return findings, cost


def _draft(
    spec: DraftSpec,
    files: ModelFiles | None,
    target: Model,
    setting: DeviceSettings,
    rounding: Rounding,
) -> tuple[list[Finding], _Cost]:
    """Findings on one draft of one kind, and what it takes."""
    if files is None:
        examined = spec.examine(target)
        if examined.target_in is None:
            return noted(examined), _Cost()
        held = held_bits(target, setting, rounding)
        if held <= BITS[examined.target_in]:
            text = f"{spec} of a target that is held in {held} bits already"
            return [finding("draft-as-target", "draft", text)], _Cost()
        more = rounded_bytes(target, examined.target_in, setting.dtype, rounding)
        whole = weight_bytes(target, setting, rounding)
        beside = (
            f"; its matrices take {size(more)} beside the target's {size(whole)}, together "
            f"{(more + whole) / whole:.2f} times the target"
        )
        return [replace(f, found=f.found + beside) for f in noted(examined)], _Cost(more)
    if isinstance(spec, DraftModel):
        draft_rounding = replace(rounding, draft=spec.quantize or rounding.draft)
        return _model(spec, files, target, setting, draft_rounding)
    head, findings = check_head(spec, files, target)
    return findings, _Cost.of(head, setting, files.stored_bytes) if head else _Cost()


# -- draft models ------------------------------------------------------------------------------


def _model(
    spec: DraftModel,
    files: ModelFiles,
    target: Model,
    setting: DeviceSettings,
    rounding: Rounding,
) -> tuple[list[Finding], _Cost]:
    other = weights_kind_of(files)
    if other is not None:
        return [another_kind(files, other)], _Cost()
    model, findings = describe(files, "draft")
    findings += check_files(files, "draft")
    if model is None:
        return findings, _Cost()
    findings += [*check_tensors(model), *check_values(files, "draft"), *check_padding(model)]
    findings += check_tied(model)
    findings += compare(target, model, spec.vocab)
    findings += [*_context(target, model), *_size(target, model)]
    findings += check_precision(model, setting, rounding)
    return findings, _Cost.of_model(model, setting, rounding, setting.dtype)


def _context(target: Model, draft: Model) -> list[Finding]:
    findings = []
    ours, theirs = target.max_positions, draft.max_positions
    if theirs < ours:
        text = f"the draft has {theirs:,} positions, the target {ours:,}"
        findings.append(finding("draft-context-short", "pair", text))
    else:
        text = f"the draft's {theirs:,} positions cover the target's {ours:,}"
        findings.append(finding("context-covered", "pair", text))
    window = _window(draft.config)
    if window is not None and window < ours:
        text = f"all layers of the draft see at most {window:,} tokens back"
        findings.append(finding("draft-window", "draft", text))
    if _scaling(target.config) != _scaling(draft.config):
        text = f"rotary scaling {_scaling(target.config)} against {_scaling(draft.config)}"
        findings.append(finding("rope-scaling-differs", "pair", text))
    return findings


def _window(config: Any) -> int | None:
    """The sliding window of a model none of whose layers sees more."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None) or ()
    return None if "full_attention" in kinds else int(window)


def _scaling(config: Any) -> str:
    """Kind and factor of a model's rotary scaling."""
    options = getattr(config, "rope_parameters", None) or {}
    inner = options.get("full_attention", options)
    if not isinstance(inner, Mapping):
        return "default"
    factor = inner.get("factor")
    return str(inner.get("rope_type", "default")) + ("" if factor is None else f" x{factor:g}")


def _size(target: Model, draft: Model) -> list[Finding]:
    """Parameters and depth against the target's."""
    ratio = target.parameters / max(1, draft.parameters)
    times = f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"
    text = f"the draft is {times} times smaller than the target"
    if ratio < 1:
        text = "the draft is larger than the target"
    text += f": {millions(draft.parameters)} against {millions(target.parameters)} parameters"
    findings = []
    if ratio < _SMALL_ENOUGH:
        severity = None if ratio < _SMALLER else NOTE
        findings.append(finding("draft-too-large", "pair", text, severity))
    else:
        findings.append(finding("draft-small", "pair", text))
    depth = draft.num_layers / target.num_layers
    if depth > _DEEPISH:
        severity = None if depth > _DEEP else NOTE
        text = f"the draft has {draft.num_layers} layers, the target {target.num_layers}"
        findings.append(finding("draft-deep", "pair", text, severity))
    return findings
