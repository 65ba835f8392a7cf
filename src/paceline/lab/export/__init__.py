"""``paceline export``: configuration of another engine for the same target, draft and length."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paceline.core.keywords import forgiving
from paceline.draft.auto import made_for
from paceline.drafters import Auto, NGram, NoDraft, parse_draft
from paceline.errors import ConfigError, WriteError
from paceline.files import json_object, write_files
from paceline.lab.export.dialects import DIALECTS as DIALECTS
from paceline.lab.export.speculation import Export, note_missing_features
from paceline.settings.tuned import TunedSettings

_LOST = "its other drafts are lost; `paceline bench --draft` shows what this one gains alone"


@forgiving("export")
def export(
    to: str,
    model: str,
    draft: str | None = None,
    *,
    draft_length: int | str | None = None,
    rule: str | None = None,
    max_batch_size: int | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
) -> Export:
    """The configuration of engine ``to`` for the same speculative decoding.

    ``draft``, ``draft_length``, ``rule`` and ``max_batch_size`` are those of ``LLM``; None takes
    them from ``config``, a file of ``paceline tune``, or our defaults. ``out``: a folder for the
    files, converted heads included; None writes none. If the draft is "auto" or comes from
    ``config`` and the engine does not support it, the next best supported draft is exported.

    Raises ConfigError if the engine has no equivalent, ModelLoadError and WriteError."""
    if to not in DIALECTS:
        raise ConfigError(f"cannot export to {to!r}; use one of {', '.join(DIALECTS)}")
    tuned = None if config is None else TunedSettings.read(config)
    measured = tuned.draft if tuned is not None and draft in (None, tuned.draft.spec) else None
    spec = parse_draft(draft if measured is None else measured.spec)
    specs = [spec]
    if measured is not None or isinstance(spec, Auto):  # not named by the user
        specs += [*(made_for(model) or ())[:1], *spec.members(), NGram()]
    if isinstance(spec, NoDraft):
        raise ConfigError("there is no draft to export; give one with --draft or --config")
    usual = "auto" if measured is None else measured.length
    length = usual if draft_length is None else draft_length
    rule = rule or "auto"
    batch = max_batch_size or (tuned.engine.max_batch_size if tuned else 8)
    dialect = DIALECTS[to]
    for chosen in specs:
        levels = chosen.default_draft_length if isinstance(length, str) else length
        if levels < 1:
            raise ConfigError("a draft length of 0 is plain decoding; there is nothing to export")
        speculation = levels, length == "auto", rule, batch
        made = Export(to, dialect, model, chosen, *speculation, Path(out) if out else None)
        try:
            made.fill()
            break
        except ConfigError as error:
            if chosen is specs[-1] or isinstance(error, WriteError):
                raise
    if made.draft is not spec:
        made.approximate(f"--draft {spec}", f"the next best, --draft {made.draft}", _LOST)
    note_missing_features(made)
    if made.out is not None:
        _write(made, made.out)
    return made


def _write(made: Export, folder: Path) -> None:
    """Write the files and remove those of an earlier export. Raises WriteError."""
    lines = ["#!/bin/sh", f"# Made by `paceline export` for {made.dialect.version}."]
    lines += [f"# Approximated: {approximation.line()}" for approximation in made.approximations]
    lines += ["set -e", *made.steps, f"exec {made.command_line}", ""]
    record = json.dumps(made.record(), indent=2) + "\n"
    texts = {**made.files, "run.sh": "\n".join(lines), "export.json": record}
    earlier = json_object(folder / "export.json")
    write_files({folder / name: text.encode() for name, text in texts.items()}, "the export")
    files = earlier.get("files")
    for name in {*files} - {*texts} if isinstance(files, dict) else ():
        if Path(name).name == name and (folder / name).is_file():
            (folder / name).unlink()
    if made.head is None and earlier.get("head") == made.in_folder("head") != made.draft_path:
        shutil.rmtree(folder / "head", ignore_errors=True)
