"""All checks on a target and its drafts, from their small files and headers alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.drafters import parse_draft
from paceline.lab.doctor.chats import check_chat, check_ends
from paceline.lab.doctor.drafts import check_drafts, folder_of
from paceline.lab.doctor.files import read_files
from paceline.lab.doctor.findings import Finding, by_severity
from paceline.lab.doctor.machine import (
    Needs,
    Setting,
    check_dtype,
    check_kernels,
    check_memory,
    check_offload,
    check_precision,
    has_kernels,
)
from paceline.lab.doctor.models import describe
from paceline.lab.doctor.weights import check_files, check_weights
from paceline.model.backends.base import REFERENCE
from paceline.model.loading import dtype_to_load, resolve_device
from paceline.model.offload import plan_offload
from paceline.model.paged.int8 import cache_dtype
from paceline.parallel.load import check_shareable


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
    resolved = resolve_device(device)
    run = backend if offload is None and tensor_parallel == 1 else REFERENCE
    number = dtype_to_load(dtype, resolved, run)
    setting = Setting(
        resolved,
        number,
        max_batch_size,
        kv_cache_memory,
        cache_dtype(kv_cache_dtype, number or torch.bfloat16),
        None if quantize == "none" else quantize,
        draft_quantize,
        backend,
        has_kernels(resolved, run),
    )
    files = read_files(target)
    if tensor_parallel > 1:
        check_shareable(target, tensor_parallel)
    drafts = [(spec, folder_of(spec)) for spec in specs]  # bad paths are errors before all else
    model, findings = describe(files, "target")
    findings += check_files(files, "target")
    if model is None:
        return by_severity(findings)
    findings += [*check_weights(model), *check_chat(model), *check_ends(model)]
    findings += check_precision(model, setting)
    ranks = tensor_parallel if setting.device.type == "cuda" else 1  # a processor is all ranks'
    needs = Needs.of_model(model, setting, setting.cache_dtype).shared(ranks)
    beside = setting  # what a draft is loaded beside
    if offload is not None:
        plan = plan_offload(target, dtype, device, offload, weights_memory)
        findings.append(check_offload(plan, offload))
        needs = replace(needs, weights=plan.peak, loading=0)
        beside = replace(setting, kernels=has_kernels(resolved, backend))  # its 4-bit form
    noticed, needs = check_drafts(drafts, model, beside, needs)
    findings += [*noticed, *check_dtype(setting, needs.weights)]
    few = any(one.code.startswith("quantised") for one in findings)
    findings.append(check_kernels(setting, few))
    return by_severity([*findings, check_memory(setting, needs, model.max_positions)])


# The settings of an engine that decide what is found, as keywords.
SETTINGS = frozenset(inspect.signature(examine).parameters) - {"target", "draft"}
