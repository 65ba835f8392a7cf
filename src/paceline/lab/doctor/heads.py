"""Heads, held against a target by the code that loads them, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.draft.heads.checkpoint import Checkpoint, weights_kind
from paceline.draft.heads.speculators import is_speculators
from paceline.draft.spec import DraftSpec, Examined
from paceline.errors import ModelLoadError
from paceline.lab.doctor.files import ModelFiles, read_files
from paceline.lab.doctor.findings import Finding, finding, parted
from paceline.lab.doctor.models import Model
from paceline.lab.doctor.weights import check_files, check_values

_TABLES = ("d2t", "t2d", "token_map")  # small, and their values decide


def weights_kind_of(files: ModelFiles) -> tuple[str, str] | None:
    """What a folder holds, and the spec's word for it, if that is no language model."""
    what, kind = weights_kind(files.tensors)
    return (what, kind) if kind else None


def another_kind(files: ModelFiles, other: tuple[str, str]) -> Finding:
    """A folder that holds what ``weights_kind_of`` says instead of what the spec says."""
    text, cure = f"{files.name} holds {other[0]}", f"Use --draft {other[1]}:{files.name}."
    return finding("draft-of-another-kind", "draft", text, cure=cure)


def noted(examined: Examined) -> list[Finding]:
    """What a kind of drafter says of a draft, as findings."""
    return [finding(code, "draft", text, cure=cure) for code, text, cure in examined.notes]


def check_head(
    spec: DraftSpec, files: ModelFiles, target: Model
) -> tuple[Examined | None, list[Finding]]:
    """The head that a spec names, in its folder's ``files``; None if it cannot be used."""
    if not (files.tensors or files.pickled or files.damaged or files.remote):
        other = weights_kind_of(read_files(files.name))  # under a file name of another kind's
        if other is not None:
            return None, [another_kind(files, other)]
    findings = [*check_files(files, "draft")]
    if not files.whole:
        return None, findings
    checkpoint = Checkpoint(files.name, dict(files.config), _stand_ins(files))
    size: Examined | None = None
    try:
        size = spec.examine(target, checkpoint)
        findings += noted(size)
    except ModelLoadError as error:
        problem, cure = parted(error)
        code = "draft-of-another-kind" if "Use --draft" in (cure or "") else "head-refused"
        findings.append(finding(code, "draft", problem, cure=cure))
    findings += _base(files, target)
    findings += check_values(files, "draft")
    return size, findings


def _stand_ins(files: ModelFiles) -> dict[str, torch.Tensor]:
    """All tensors without values, but for the tables of the draft vocabulary."""
    result: dict[str, torch.Tensor] = {}
    for key, entry in files.tensors.items():
        values = entry.read() if key.rpartition(".")[2] in _TABLES else None
        result[key] = entry.stand_in() if values is None else values.view(entry.shape)
    return result


def _base(files: ModelFiles, target: Model) -> list[Finding]:
    """The model that the head was made for, by its name."""
    base_model: Any = files.config.get("base_model_name_or_path")
    if is_speculators(dict(files.config)):
        verifier = files.config.get("speculators_config", {}).get("verifier", {})
        base_model = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(base_model, str) or not base_model:
        return []
    if base_model.rstrip("/").rpartition("/")[2] == target.name.rstrip("/").rpartition("/")[2]:
        return []
    return [
        finding("head-base-differs", "draft", f"made for {base_model}, used with {target.name}")
    ]
