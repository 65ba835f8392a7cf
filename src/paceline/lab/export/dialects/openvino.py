"""OpenVINO GenAI 2026.4: a short Python program; models converted by optimum; chains."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.lab.export.speculation import (
    FEWER_MATCHES,
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)

VERSION = "openvino-genai 2026.4.1"
FILE = "openvino_generate.py"
_PROGRAM = '''"""Made by `paceline export --to openvino`."""

import sys

import openvino_genai as genai

pipeline = genai.LLMPipeline(
    {target!r},
    "CPU",
    scheduler_config=genai.SchedulerConfig(),{arguments}
)
config = genai.GenerationConfig()
{settings}config.max_new_tokens = 128
config.validate()
print(pipeline.generate(sys.argv[1], config))
'''


def to_openvino(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it)
    draft, arguments = it.draft, ""
    config: dict[str, Any] = {"num_assistant_tokens": it.length}
    target, steps = _converted(it, it.path, "target")
    if isinstance(draft, DraftModel):
        draft_folder, made = _converted(it, it.draft_path, "draft")
        steps += made
        arguments = f'\n    draft_model=genai.draft_model({draft_folder!r}, "CPU"),'
    elif isinstance(draft, NGram):
        config["max_ngram_size"] = draft.max
        arguments = "\n    prompt_lookup=True,"
        if draft.candidates > 1 or draft.source != "prompt":
            what = f"{draft.candidates} candidates from {draft.source}"
            notes.append(Approximation(what, "one match", FEWER_MATCHES))
    else:
        raise it.refuse(
            "OpenVINO GenAI",
            "export a draft model or ngram (its EAGLE-3 counts layers by outputs and takes the "
            "numbers only from inside a converted model; left alone it reads one layer too far)",
        )
    settings = "".join(f"config.{name} = {value!r}\n" for name, value in config.items())
    program = _PROGRAM.format(target=target, arguments=arguments, settings=settings)
    return Exported(
        "openvino",
        VERSION,
        ("python", it.in_folder(FILE), "Once upon a time"),
        config,
        {FILE: program},
        tuple(steps),
        tuple(notes),
    )


def _converted(it: ExportedDraft, path: str, name: str) -> tuple[str, list[str]]:
    """The folder of a converted model, and the command that makes it."""
    if (Path(path) / "openvino_model.xml").is_file():
        return path, []
    made = it.in_folder(f"{name}-openvino")
    line = ["optimum-cli", "export", "openvino", "--model", path, "--weight-format", "fp32", made]
    return made, [shlex.join(line)]
