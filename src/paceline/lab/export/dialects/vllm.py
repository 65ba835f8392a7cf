"""vLLM 0.32: ``--speculative-config`` with JSON; no trees; heads in the layout of speculators."""

from __future__ import annotations

import json
from typing import Any

from paceline.draft.heads.eagle import Eagle
from paceline.draft.heads.medusa import Medusa
from paceline.draft.hybrid import Hybrid
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.draft.suffix import Suffix
from paceline.lab.export.heads import medusa_of, placed_head, write_medusa
from paceline.lab.export.speculation import (
    FEWER_MATCHES,
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)

VERSION = "vllm 0.32.0"


def to_vllm(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it, rules=("token", "block"))
    config, head = _config(it, notes)
    config.setdefault("num_speculative_tokens", it.length)
    if it.rule == "block" and config["method"] in ("draft_model", "eagle", "eagle3"):
        config |= {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
    elif config["method"] in ("draft_model", "eagle3"):
        config["draft_sample_method"] = "probabilistic"  # the default drafts greedily
    text = json.dumps(config)
    command = ("vllm", "serve", it.path, "--max-num-seqs", str(it.batch))
    return Exported(
        "vllm",
        VERSION,
        (*command, "--speculative-config", text),
        config,
        {"vllm.json": json.dumps(config, indent=2) + "\n"},
        approximations=tuple(notes),
        head=head,
    )


def _config(it: ExportedDraft, notes: list[Approximation]) -> tuple[dict[str, Any], str | None]:
    """The method and what belongs to it, and the folder of a head."""
    draft = it.draft
    if isinstance(draft, DraftModel):
        return {"method": "draft_model", "model": it.draft_path}, None
    if isinstance(draft, Eagle):
        method, layout = ("eagle3", "speculators") if draft.version == 3 else ("eagle", "eagle")
        model, head = placed_head(it, draft, layout)
        return {"method": method, "model": model}, head
    if isinstance(draft, Medusa):
        heads, head = medusa_of(draft, it.target), None
        if it.out is not None:
            write_medusa(heads, it.out / "head")
            head = it.in_folder("head")
        length = min(it.length, heads.config.heads)
        config = {"method": "medusa", "model": head or it.draft_path}
        return config | {"num_speculative_tokens": length}, head
    if isinstance(draft, Suffix):
        return _suffix(draft, it.batch), None
    if isinstance(draft, NGram):
        if draft.candidates > 1 or draft.source != "both":
            what = f"{draft.candidates} candidates from {draft.source}"
            instead = "one, the earliest match, from prompt and answer"
            notes.append(Approximation(what, instead, FEWER_MATCHES))
        look = {"prompt_lookup_min": draft.min, "prompt_lookup_max": draft.max}
        return {"method": "ngram"} | look, None
    if isinstance(draft, Hybrid):
        kinds = {type(part) for part in draft.parts}
        if kinds <= {NGram, Suffix}:
            instead = "paceline.integrations.vllm, which must be installed beside vLLM"
            cost = "chains only; an interface that vLLM calls experimental"
            notes.append(Approximation("the hybrid of lookups", instead, cost))
            proposer = "paceline.integrations.vllm.HybridProposer"
            return {"method": "custom_class", "model": proposer}, None
    raise it.refuse(
        "vLLM", "export eagle3, medusa, a draft model, ngram, suffix or hybrid:suffix+ngram"
    )


def _suffix(draft: Suffix, batch: int) -> dict[str, Any]:
    return {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": draft.max_depth,
        "suffix_decoding_max_spec_factor": draft.factor,
        "suffix_decoding_min_token_prob": draft.min_prob,
        "suffix_decoding_max_cached_requests": 10_000 if draft.shared else 0,
    }
