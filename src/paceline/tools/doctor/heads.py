"""EAGLE and Medusa heads, held against a target by the code that loads them, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config import DraftSpec
from paceline.draft.heads import eagle_format, medusa_format
from paceline.draft.heads.checkpoint import Checkpoint
from paceline.draft.heads.eagle_format import TargetShape
from paceline.draft.heads.eagle_head import EagleConfig, default_feature_layers
from paceline.draft.heads.speculators import is_speculators
from paceline.drafters import feature_layers
from paceline.errors import ModelLoadError
from paceline.tools.doctor.files import ModelFiles, read_files
from paceline.tools.doctor.findings import Finding, finding, parted
from paceline.tools.doctor.models import Model, millions
from paceline.tools.doctor.weights import check_files, check_values

_TABLES = ("d2t", "t2d", "token_map")  # small, and their values decide


@dataclass(frozen=True)
class HeadSize:
    """What a head adds to the target."""

    parameters: int
    cache_values: int  # numbers cached for one token
    feature_values: int = 0  # numbers of one token's features, of which some tokens' are kept


def head_files(kind: str) -> tuple[str, ...]:
    """Names of the weights files of a kind of head; the first that is there counts."""
    return medusa_format.FILES if kind == "medusa" else eagle_format.FILES


def head_kind(files: ModelFiles) -> tuple[str, str] | None:
    """What a folder holds, and the spec's word for it, if that is no language model."""
    names = {key.removeprefix("model.") for key in files.tensors}
    if "fc.weight" in names:
        third = "d2t" in names or any("hidden_norm" in key for key in names)
        return ("an EAGLE-3 head", "eagle3") if third else ("an EAGLE head", "eagle")
    if any(key[0].isdigit() or key.startswith(("medusa", "blocks.")) for key in names):
        return "Medusa heads", "medusa"
    return None


def another_kind(files: ModelFiles, other: tuple[str, str]) -> Finding:
    """A folder that holds what ``head_kind`` says instead of what the spec says."""
    text, cure = f"{files.name} holds {other[0]}", f"Use --draft {other[1]}:{files.name}."
    return finding("draft-of-another-kind", "draft", text, cure=cure)


def check_head(
    spec: DraftSpec, files: ModelFiles, target: Model
) -> tuple[HeadSize | None, list[Finding]]:
    """The head that a spec names, in its folder's ``files``; None if it cannot be used."""
    if not (files.tensors or files.pickled or files.damaged or files.remote):
        other = head_kind(read_files(files.name))  # under a file name of another kind's
        if other is not None:
            return None, [another_kind(files, other)]
    findings = [*check_files(files, "draft")]
    if not files.whole:
        return None, findings
    checkpoint = Checkpoint(files.name, dict(files.config), _stand_ins(files))
    size: HeadSize | None = None
    try:
        if spec.kind == "medusa":
            size = _medusa(checkpoint, target, findings)
        else:
            size = _eagle(spec, checkpoint, target, findings)
    except ModelLoadError as error:
        found, cure = parted(error)
        code = "draft-of-another-kind" if "Use --draft" in (cure or "") else "head-refused"
        findings.append(finding(code, "draft", found, cure=cure))
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


def _shape(target: Model) -> TargetShape:
    return TargetShape(target.hidden_size, target.vocab_size, target.num_layers)


def _eagle(
    spec: DraftSpec, checkpoint: Checkpoint, target: Model, findings: list[Finding]
) -> HeadSize:
    version, given = 3 if spec.kind == "eagle3" else 1, feature_layers(spec)
    head, _ = eagle_format.build_eagle(checkpoint, _shape(target), version, given)
    config, size = head.config, _count(head)
    reads = f"inputs of layers {list(config.feature_layers)}" if version == 3 else "the last output"
    text = f"EAGLE-{version} head of {millions(size)} parameters, reads {reads}"
    findings.append(finding("head-fits", "draft", text))
    if given is None and version == 3:
        findings += _layers(spec, checkpoint, config, target)
    if config.draft_vocab_size < target.vocab_size:
        text = f"drafts {config.draft_vocab_size:,} of the target's {target.vocab_size:,} tokens"
        findings.append(finding("head-vocabulary-reduced", "draft", text))
    if config.max_positions < target.max_positions:
        text = (
            f"the head has {config.max_positions:,} positions, the target {target.max_positions:,}"
        )
        findings.append(finding("head-context-short", "draft", text))
    features = len(config.feature_layers) * target.hidden_size
    return HeadSize(size, 2 * config.kv_heads * config.head_dim, features)


def _layers(
    spec: DraftSpec, checkpoint: Checkpoint, config: EagleConfig, target: Model
) -> list[Finding]:
    """Feature layers that are those of the paper, but one off."""
    said, ids = checkpoint.config, config.feature_layers
    nested = said.get("eagle_config")
    own = nested if isinstance(nested, Mapping) else {}
    key = "eagle_aux_hidden_state_layer_ids"
    usual = default_feature_layers(3, target.num_layers)
    if not (said.get(key) or own.get(key)):
        return [finding("head-layers-assumed", "draft", f"layers {list(usual)} are taken")]
    for shift in (-1, 1):
        if ids == tuple(layer + shift for layer in usual):
            text = f"layers {list(ids)}, one off from the usual {list(usual)}"
            right = "x".join(map(str, usual))
            cure = f"Try --draft {spec.kind}:{spec.argument},layers={right} and compare with --run."
            return [finding("head-layers-shifted", "draft", text, cure=cure)]
    return []


def _medusa(checkpoint: Checkpoint, target: Model, findings: list[Finding]) -> HeadSize:
    shape = _shape(target)
    heads, _ = medusa_format.build_medusa(
        checkpoint, shape.hidden_size, shape.vocab_size, shape.num_layers
    )
    config = heads.config
    shared = "the target's vocabulary layer" if config.shared_head else "vocabulary layers"
    text = f"Medusa: {config.heads} heads of {config.layers} blocks, width {config.hidden_size}, "
    findings.append(finding("head-fits", "draft", f"{text}with {shared}"))
    if config.draft_vocab_size is not None:
        text = f"drafts {config.draft_vocab_size:,} of the target's {target.vocab_size:,} tokens"
        findings.append(finding("head-vocabulary-reduced", "draft", text))
    if not config.accuracy:
        text = "config.json does not say how often each head is right"
        findings.append(finding("medusa-accuracy-unknown", "draft", text))
    return HeadSize(_count(heads), 0)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _base(files: ModelFiles, target: Model) -> list[Finding]:
    """The model that the head was made for, by its name."""
    said: Any = files.config.get("base_model_name_or_path")
    if is_speculators(dict(files.config)):
        verifier = files.config.get("speculators_config", {}).get("verifier", {})
        said = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(said, str) or not said:
        return []
    if said.rstrip("/").rpartition("/")[2] == target.name.rstrip("/").rpartition("/")[2]:
        return []
    return [finding("head-base-differs", "draft", f"made for {said}, used with {target.name}")]
