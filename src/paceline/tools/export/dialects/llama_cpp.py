"""llama.cpp (0.5.0-dev of late 2026): flags of llama-server; GGUF files; chains."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.draft.heads.eagle import Eagle
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.model.gguf import gguf_file
from paceline.tools.export.heads import eagle_of, write_eagle
from paceline.tools.export.speculation import (
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)

VERSION = "llama.cpp 0.5.0-dev"
_CONVERT = ("python", "convert_hf_to_gguf.py")


def to_llama_cpp(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it, rules=("coupled",) if it.rule == "coupled" else ("token",))
    draft, head, steps = it.draft, None, []
    target, made = _gguf(it.path, "target.gguf", it.out)
    steps += made
    flags: list[str] = []
    if isinstance(draft, DraftModel):
        own, made = _gguf(it.draft_path, "draft.gguf", it.out)
        steps += made
        flags = ["--spec-type", "draft-simple", "-md", own]
    elif isinstance(draft, Eagle) and draft.version == 3:
        model = it.draft_path
        if it.out is not None:
            head = model = str((it.out / "head").resolve())
            write_eagle(eagle_of(draft, it.target), it.out / "head", it.target, "eagle")
        own, made = _gguf(model, "head.gguf", it.out, ("--target-model-dir", it.path))
        steps += made
        flags = ["--spec-type", "draft-eagle3", "-md", own]
    elif isinstance(draft, NGram):
        flags = ["--spec-type", "ngram-simple"]
        flags += ["--spec-ngram-simple-size-n", str(draft.max)]
        flags += ["--spec-ngram-simple-size-m", str(it.length)]
        if draft.min < draft.max or draft.candidates > 1:
            notes.append(_one_size(draft))
    else:
        raise it.refuse("llama.cpp", "export eagle3, a draft model or ngram")
    if "-md" in flags:
        flags += ["--spec-draft-n-max", str(it.length), "--spec-draft-n-min", "0"]
        flags += ["--spec-draft-p-min", "0"]  # as here: the draft's doubts end no chain
    command = ("llama-server", "-m", target, "-np", str(it.batch), *flags)
    config = dict(zip(flags[::2], flags[1::2], strict=True))
    return Exported(
        "llama.cpp",
        VERSION,
        command,
        config,
        steps=tuple(steps),
        approximations=tuple(notes),
        head=head,
    )


def _gguf(
    path: str, name: str, out: Path | None, more: tuple[str, ...] = ()
) -> tuple[str, list[str]]:
    """The GGUF file of a model, and the command that makes it where there is none."""
    found = gguf_file(path)
    if found is not None:
        return str(found), []
    made = name if out is None else str((out / name).resolve())
    return made, [shlex.join([*_CONVERT, path, *more, "--outtype", "bf16", "--outfile", made])]


def _one_size(draft: NGram) -> Approximation:
    return Approximation(
        f"matches of {draft.min} to {draft.max} tokens, {draft.candidates} candidates",
        f"one match of exactly {draft.max}",
        "fewer drafts; try ngram-map-k",
    )
