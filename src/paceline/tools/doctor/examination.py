"""All checks on a target and its drafts, from their small files and headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from paceline.config import DraftSpec
from paceline.draft.selfspec import parse_layers
from paceline.drafters import (
    DRAFTERS,
    POLICY_OPTIONS,
    SWIFT_OPTIONS,
    Loading,
    exit_layers,
    tree_policy,
)
from paceline.errors import ConfigError
from paceline.tools.doctor.chats import check_chat, check_ends
from paceline.tools.doctor.files import ModelFiles, read_files
from paceline.tools.doctor.findings import Finding, by_severity, finding
from paceline.tools.doctor.heads import another_kind, check_head, head_files, head_kind
from paceline.tools.doctor.kinds import NOTE
from paceline.tools.doctor.machine import DeviceSettings, MemoryNeeds, check_dtype, check_memory
from paceline.tools.doctor.models import Model, check_tensors, describe, millions
from paceline.tools.doctor.rows import check_padding, check_tied
from paceline.tools.doctor.tokens import compare
from paceline.tools.doctor.weights import check_files, check_values

_MODELS = ("model", "tree")
_HEADS = {
    "eagle": (*POLICY_OPTIONS, "layers"),
    "eagle2": (*POLICY_OPTIONS, "layers"),
    "eagle3": (*POLICY_OPTIONS, "layers"),
    "medusa": ("nodes", "tree"),
}
_SMALLER, _SMALL_ENOUGH = 4, 10  # times smaller than the target: at least, and better
_DEEP, _DEEPISH = 1 / 2, 1 / 4  # of the target's layers


@dataclass(frozen=True)
class _Cost:
    """What a draft adds to memory."""

    weights: int = 0
    cache_bytes: int = 0
    feature_bytes: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.weights + other.weights,
            self.cache_bytes + other.cache_bytes,
            self.feature_bytes + other.feature_bytes,
        )


def examine(
    target: str,
    draft: str | Sequence[str] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch_size: int = 8,
    kv_cache_memory: int | None = None,
) -> list[Finding]:
    """Look at a target and its draft or drafts before they are loaded; the worst comes first.

    Arguments as of ``LLM``. Reads config.json, tokenizers, headers and samples of the weights: a
    second's work for a model of any size. Of a hub name that is not on this machine the small
    files are fetched. What is wrong with the models is a finding; what is wrong with the
    arguments raises ModelLoadError (no such folder, no config.json, unreadable JSON) or
    ConfigError (an unknown option of a draft, an unusable device or dtype), in one line.
    """
    texts = [draft] if draft is None or isinstance(draft, str) else list(draft)
    specs = [spec for text in texts for spec in _members(text)]
    setting = DeviceSettings.of(dtype, device, max_batch_size, kv_cache_memory)
    files = read_files(target)
    drafts = [_folder_of(spec) for spec in specs]  # bad paths are errors before all else
    model, findings = describe(files, "target")
    findings += check_files(files, "target")
    if model is None:
        return by_severity(findings)
    findings += [*check_tensors(model), *check_values(files, "target"), *check_padding(model)]
    findings += [*check_tied(model), *check_chat(model), *check_ends(model)]
    cost = _Cost(model.weight_bytes(setting.dtype), model.cache_bytes(setting.dtype))
    for number, (spec, folder) in enumerate(zip(specs, drafts, strict=True), 1):
        own, more = _draft(spec, folder, model, setting)
        about = "draft" if len(specs) == 1 else f"draft {number} ({spec.kind})"
        findings += [replace(f, about=about) if f.about == "draft" else f for f in own]
        cost += more
    findings += check_dtype(setting, cost.weights)
    load = MemoryNeeds(cost.weights, cost.cache_bytes, model.max_positions, cost.feature_bytes)
    return by_severity([*findings, check_memory(setting, load)])


def _members(text: str | None) -> list[DraftSpec]:
    """The specs of a draft; of a hybrid, those it is made of."""
    spec = DraftSpec.parse(text, tuple(DRAFTERS))
    return spec.members(tuple(DRAFTERS)) if spec.kind == "hybrid" else [spec]


def _folder_of(spec: DraftSpec) -> ModelFiles | None:
    """What a spec's folder holds. Raises ConfigError and ModelLoadError."""
    if spec.kind in _HEADS:
        spec.check_options(_HEADS[spec.kind])
        if spec.kind != "medusa":
            tree_policy(spec)
        if not spec.argument:
            raise ConfigError(f"draft {spec.kind!r} needs a head: {spec.kind}:PATH")
        return read_files(spec.argument, head_files(spec.kind))
    if spec.kind not in _MODELS:
        return None
    spec.check_options((*POLICY_OPTIONS, "vocab"))
    tree_policy(spec)
    if not spec.argument:
        raise ConfigError(f"draft {spec.kind!r} needs a model: {spec.kind}:PATH")
    return read_files(spec.argument)


def _draft(
    spec: DraftSpec, files: ModelFiles | None, target: Model, setting: DeviceSettings
) -> tuple[list[Finding], _Cost]:
    """Findings on one draft of one kind, and what it takes."""
    if files is not None and spec.kind in _HEADS:
        size, findings = check_head(spec, files, target)
        if size is None:
            return findings, _Cost()
        width = (setting.dtype or torch.bfloat16).itemsize
        values = (size.parameters, size.cache_values, size.feature_values)
        return findings, _Cost(*(width * value for value in values))
    if files is not None:
        return _model(spec, files, target, setting)
    if spec.kind == "none":
        return [finding("draft-none", "draft", "no draft is given")], _Cost()
    if spec.kind in ("early_exit", "layer_skip"):
        return [_own_layers(spec, target.num_layers)], _Cost()
    # Prepared as the engine would: options, and the corpus of suffix. Of the target that takes
    # its vocabulary only.
    stand_in = SimpleNamespace(device=torch.device("cpu"), vocab_size=target.vocab_size)
    DRAFTERS[spec.kind](spec, cast(Loading, SimpleNamespace(target=stand_in)))
    text = f"{spec.kind} needs no weights and no cache of its own"
    return [finding("draft-free", "draft", text)], _Cost()


def _own_layers(spec: DraftSpec, total: int) -> Finding:
    """Drafting with part of the target itself."""
    if spec.kind == "early_exit":
        spec.check_options(("layers", *POLICY_OPTIONS))
        run = exit_layers(spec, total)
    else:
        spec.check_options(("skip", *SWIFT_OPTIONS, *POLICY_OPTIONS))
        if "skip" in spec.options:
            run = total - len(parse_layers(spec.options["skip"], total))
        else:
            run = max(1, round(total * (1 - spec.number("ratio", 0.45))))
    tree_policy(spec)
    text = f"{spec.kind} drafts with {run} of the target's {total} layers"
    return finding("draft-own-layers", "draft", text)


# -- draft models ------------------------------------------------------------------------------


def _model(
    spec: DraftSpec, files: ModelFiles, target: Model, setting: DeviceSettings
) -> tuple[list[Finding], _Cost]:
    other = head_kind(files)
    if other is not None:
        return [another_kind(files, other)], _Cost()
    model, findings = describe(files, "draft")
    findings += check_files(files, "draft")
    if model is None:
        return findings, _Cost()
    findings += [*check_tensors(model), *check_values(files, "draft"), *check_padding(model)]
    findings += check_tied(model)
    findings += compare(target, model, spec.options.get("vocab", "auto"))
    findings += [*_context(target, model), *_size(target, model)]
    return findings, _Cost(model.weight_bytes(setting.dtype), model.cache_bytes(setting.dtype))


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
