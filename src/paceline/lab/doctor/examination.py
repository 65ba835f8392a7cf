"""Runs all checks on a target and its drafts, using only their small files and headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

from paceline.build import EngineOptions
from paceline.core.memory import free_memory
from paceline.draft.auto import Circumstances, Composition, compose
from paceline.draft.heads.checkpoint import Checkpoint, weights_kind
from paceline.draft.heads.mtp import mtp_names
from paceline.drafters import Auto, DraftModel, DraftSpec, parse_draft
from paceline.errors import ModelLoadError
from paceline.lab.doctor import contents, machine
from paceline.lab.doctor.findings import (
    ERROR,
    Finding,
    by_severity,
    finding,
    findings_of,
    refusal,
)
from paceline.lab.doctor.machine import Needs, Setting
from paceline.lab.doctor.models import Model, ModelFiles, describe, read_files
from paceline.model.loading import recurrent_layers
from paceline.model.offload import plan_offload
from paceline.model.quantised.weights import BITS
from paceline.parallel.processes import check_shareable

# Vocabulary tables of a head. They are small, and their values are checked.
_TABLES = ("d2t", "t2d", "token_map")

_Checked = Iterator[Finding | Needs]  # findings about a draft, and the memory that it needs


def examine(
    target: str, draft: str | Sequence[str] | None = None, **settings: Any
) -> list[Finding]:
    """Check a target and its drafts without loading them; the worst findings come first.

    ``settings``: engine options, as keywords of ``LLM``. Downloads the small files of a hub model
    that is not on this machine. Raises ModelLoadError (no such folder, no config.json) and
    ConfigError (unknown option of a draft, unusable device)."""
    texts = [draft] if draft is None or isinstance(draft, str) else draft
    specs = [spec for text in texts for spec in parse_draft(text).members()]
    options = EngineOptions(**settings)
    setting = Setting.of(options)
    files = read_files(target)
    if options.tensor_parallel > 1:
        check_shareable(target, options.tensor_parallel)
    model, checked = _check_model(files, "target", setting)
    findings = findings_of("target", checked)
    if model is None:
        return by_severity(findings)
    needs, draft_setting = Needs.of_model(model, setting, setting.cache_dtype), setting
    if setting.device.type == "cuda":  # on a CPU all ranks share the same memory
        needs = needs.shared(options.tensor_parallel)
    if options.offload is not None:
        away = options.offload, options.weights_memory
        plan = plan_offload(target, options.dtype, options.device, *away)
        findings.append(machine.check_offload(plan, options.offload))
        needs = replace(needs, weights=plan.peak_bytes, loading=0)
        # The kernels run a 4-bit copy of the target as a draft.
        kernels = machine.has_kernels(setting.device, options.backend)
        draft_setting = replace(setting, kernels=kernels)
    draft_findings, needs = check_drafts(specs, model, draft_setting, needs)
    findings += [*draft_findings, machine.check_dtype(setting)]
    quantised = any(item.code.startswith("quantised") for item in findings)
    context = min(model.max_positions, options.max_model_len or model.max_positions)
    memory = machine.check_memory(setting, needs, context)
    return by_severity([*findings, machine.check_kernels(setting, quantised), memory])


def _check_model(
    files: ModelFiles, about: str, setting: Setting
) -> tuple[Model | None, list[Finding]]:
    model, findings = describe(files, about)
    findings += contents.check_files(files)
    if model is not None:
        findings += [*contents.check_weights(model), *machine.check_precision(model, setting)]
        if about == "target" and (tokenizer := model.tokenizer) is not None:
            findings += contents.check_chat(model, tokenizer)
        if recurrent := recurrent_layers(model.whole_config):
            values: Any = {"kinds": ", ".join(sorted({*recurrent})), "layers": model.num_layers}
            values["size"] = machine.size(model.state_bytes(setting.loaded))
            findings.append(finding("recurrent-layers", recurrent=len(recurrent), **values))
    return model, findings


def check_drafts(
    specs: Sequence[DraftSpec], target: Model, setting: Setting, needs: Needs
) -> tuple[list[Finding], Needs]:
    """Findings about all drafts, and ``needs`` plus those of the drafts. "auto" stands for the
    drafters that it is composed of."""
    findings: list[Finding] = []
    if any(isinstance(spec, Auto) for spec in specs):
        free = free_memory(setting.device) - needs.weights
        composed = compose_auto(target, setting, free)
        findings.append(finding("draft-auto", composed.line(), about="draft"))
        named = [spec for spec in specs if not isinstance(spec, Auto)]
        specs = [*(spec for spec, _ in composed.taken), *named]
    for number, spec in enumerate(specs, 1):
        about = "draft" if len(specs) == 1 else f"draft {number} ({spec.kind})"
        for seen in _check_draft(spec, target, setting):
            if isinstance(seen, Needs):
                needs += seen
            else:
                findings += findings_of(about, [seen])
    return findings, needs


def compose_auto(target: Model, setting: Setting, free: int) -> Composition:
    """The drafters that "auto" stands for and that load. ``free``: bytes left by the target."""
    refused = "" if setting.kernels else "which do not run it here"
    bits, weights = machine.held_bits(target, setting), machine.weight_bytes(target, setting)
    rounded = machine.rounded_bytes(target, "int4", setting)
    mtp = bool(mtp_names(target.files.tensors, target.num_layers))
    composed = compose(Circumstances(target.name, refused, bits, weights, rounded, free, mtp))
    failed: dict[DraftSpec, str] = {}
    for spec, _ in composed.taken:
        for seen in _check_draft(spec, target, setting):
            if isinstance(seen, Finding) and seen.severity is ERROR:
                failed.setdefault(spec, seen.text)
    return composed.without(failed)


def _check_draft(spec: DraftSpec, target: Model, setting: Setting) -> _Checked:
    path = spec.argument()
    if spec.argument_kind == "nothing" or path is None:
        yield from _without_files(spec, target, setting)
        return
    files = read_files(path, spec.weight_files)
    # The folder may hold weights under the file name of another kind of draft.
    empty = not (files.tensors or files.pickled or files.damaged or files.remote)
    if empty or isinstance(spec, DraftModel):
        what, kind = weights_kind((read_files(files.name) if empty else files).tensors)
        if kind:
            cure, name = f"Use --draft {kind}:{files.name}.", files.name
            yield finding("draft-of-another-kind", cure=cure, name=name, what=what)
            return
    if not isinstance(spec, DraftModel):
        yield from _check_head(spec, files, target, setting)
        return
    precision = spec.quantize or setting.options.draft_quantize
    setting = replace(setting, options=replace(setting.options, draft_quantize=precision))
    model, findings = _check_model(files, "draft", setting)
    yield from findings
    if model is not None:
        yield from contents.compare(target, model)
        ours, theirs = target.max_positions, model.max_positions
        code = "draft-context-short" if theirs < ours else "context-covered"
        yield finding(code, draft=theirs, target=ours)
        yield Needs.of_model(model, setting, setting.dtype)


def _without_files(spec: DraftSpec, target: Model, setting: Setting) -> _Checked:
    examined, bits = spec.examine(target), machine.held_bits(target, setting)
    if examined.copy_precision is None:
        yield from starmap(finding, examined.notes)
    elif bits <= BITS[examined.copy_precision]:
        yield finding("draft-as-target", draft=spec, bits=bits)
    else:
        more = machine.rounded_bytes(target, examined.copy_precision, setting)
        whole = machine.weight_bytes(target, setting)
        sizes = f"{machine.size(more)} in addition to the target's {machine.size(whole)}"
        memory = f"; its matrices take {sizes}, together {(more + whole) / whole:.2f} times as much"
        yield from (finding(code, text + memory, cure) for code, text, cure in examined.notes)
        yield Needs(more)


def _check_head(spec: DraftSpec, files: ModelFiles, target: Model, setting: Setting) -> _Checked:
    """Check a head with the code that loads heads, without its weights."""
    yield from contents.check_files(files)
    if not files.whole:
        return
    tensors = {
        key: tensor if key.rpartition(".")[2] in _TABLES else tensor.to("meta")
        for key, tensor in files.tensors.items()
    }
    try:
        head = spec.examine(target, Checkpoint(files.name, dict(files.config), tensors))
        yield from starmap(finding, head.notes)
        counts = head.parameters, head.cache_values, head.feature_values
        weights, cached, features = (setting.width * count for count in counts)
        loading, mapped = files.stored_bytes + weights, tuple(files.mapped)
        yield Needs(weights, cached, features, loading, files=mapped)
    except ModelLoadError as error:
        other_kind = "; use --draft" in str(error)
        yield refusal("draft-of-another-kind" if other_kind else "head-refused", error)
    yield from contents.check_values(files)
