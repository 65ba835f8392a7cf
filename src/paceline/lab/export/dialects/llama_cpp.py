"""llama.cpp (0.5.0-dev of late 2026): flags of llama-server; GGUF files; chains."""

from __future__ import annotations

import shlex

from paceline.draft.heads.eagle import Eagle
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.lab.export.heads import placed_head
from paceline.lab.export.speculation import (
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)
from paceline.model.gguf import gguf_file

VERSION = "llama.cpp 0.5.0-dev"
_CONVERT = ("python", "convert_hf_to_gguf.py")


def to_llama_cpp(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it, rules=("coupled",) if it.rule == "coupled" else ("token",))
    draft, head = it.draft, None
    target, steps = _gguf(it, it.path, "target.gguf")
    flags: list[str] = []
    if isinstance(draft, DraftModel):
        draft_file, made = _gguf(it, it.draft_path, "draft.gguf")
        steps += made
        flags = ["--spec-type", "draft-simple", "-md", draft_file]
    elif isinstance(draft, Eagle) and draft.version == 3:
        model, head = placed_head(it, draft, "eagle")
        draft_file, made = _gguf(it, model, "head.gguf", "--target-model-dir", it.path)
        steps += made
        flags = ["--spec-type", "draft-eagle3", "-md", draft_file]
    elif isinstance(draft, NGram):
        flags = ["--spec-type", "ngram-simple"]
        flags += ["--spec-ngram-simple-size-n", str(draft.max)]
        flags += ["--spec-ngram-simple-size-m", str(it.length)]
        if draft.min < draft.max or draft.candidates > 1:
            what = f"matches of {draft.min} to {draft.max} tokens, {draft.candidates} candidates"
            instead = f"one match of exactly {draft.max}"
            notes.append(Approximation(what, instead, "fewer drafts; try ngram-map-k"))
    else:
        raise it.refuse("llama.cpp", "export eagle3, a draft model or ngram")
    if "-md" in flags:
        flags += ["--spec-draft-n-max", str(it.length), "--spec-draft-n-min", "0"]
        flags += ["--spec-draft-p-min", "0"]  # as here: the draft's doubts end no chain
    command = ("llama-server", "-m", target, "-np", str(it.batch), *flags)
    config = dict(zip(flags[::2], flags[1::2], strict=True))
    return Exported(
        "llama.cpp", VERSION, command, config, {}, tuple(steps), tuple(notes), head=head
    )


def _gguf(it: ExportedDraft, path: str, name: str, *more: str) -> tuple[str, list[str]]:
    """The GGUF file of a model, and the command that makes it where there is none."""
    gguf = gguf_file(path)
    if gguf is not None:
        return str(gguf), []
    made = it.in_folder(name)
    return made, [shlex.join([*_CONVERT, path, *more, "--outtype", "bf16", "--outfile", made])]
