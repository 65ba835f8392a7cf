"""TensorRT-LLM 1.2: YAML with ``speculative_config``; chains; layers counted by outputs."""

from __future__ import annotations

from typing import Any

from paceline.draft.heads.eagle import Eagle
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.lab.export.heads import eagle_of, outputs_of, placed_head
from paceline.lab.export.speculation import (
    FEWER_MATCHES,
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)

VERSION = "TensorRT-LLM 1.2 (its documented classes; it cannot be installed without a GPU)"
FILE = "tensorrt_llm.yaml"


def to_tensorrt_llm(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it)
    draft, head = it.draft, None
    config: dict[str, Any] = {"max_draft_len": it.length}
    if isinstance(draft, Eagle) and draft.version == 3:
        eagle = eagle_of(draft, it.target)
        model, head = placed_head(it, draft, "eagle")
        config |= {"decoding_type": "Eagle3", "speculative_model": model}
        config["eagle3_layers_to_capture"] = outputs_of(eagle.config.feature_layers)
    elif isinstance(draft, DraftModel):
        config |= {"decoding_type": "Draft_Target", "speculative_model": it.draft_path}
    elif isinstance(draft, NGram):
        config |= {"decoding_type": "NGram", "max_matching_ngram_size": draft.max}
        config |= {"is_keep_all": True, "is_use_oldest": False, "is_public_pool": False}
        if draft.candidates > 1:
            what = f"{draft.candidates} candidates"
            notes.append(Approximation(what, "one, the newest match", FEWER_MATCHES))
    else:
        raise it.refuse("TensorRT-LLM", "export eagle3, a draft model or ngram")
    options = {"max_batch_size": it.batch, "speculative_config": config}
    return Exported(
        "tensorrt-llm",
        VERSION,
        ("trtllm-serve", it.path, "--config", it.in_folder(FILE)),
        options,
        {FILE: yaml_of(options)},
        approximations=tuple(notes),
        head=head,
    )


def yaml_of(values: dict[str, Any], indent: str = "") -> str:
    """Mappings, lists of numbers, texts, numbers and switches; texts as JSON, which YAML reads."""
    import json

    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{yaml_of(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
