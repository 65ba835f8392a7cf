"""Small prompt files in the layout of the public benchmarks' ones."""

import json
from pathlib import Path

_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
_SAID = ("the little fox", "a red ball and", "two and two", "once more")


def write_prompts(folder: Path) -> Path:
    """Four prompts a set; one of Spec-Bench's is GSM8K's, which must not come twice."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "mt_bench": [("writing", "chat", [f"write {said}", "and again"]) for said in _SAID],
        "gsm8k": [("math_word_problem", "chat", [f"count {said}"]) for said in _SAID],
        "humaneval": [("code_completion", "completion", [f"def {said}"]) for said in _SAID],
        "spec_bench": [(task, "chat", [f"{task} {said}"]) for task in _TASKS for said in _SAID]
        + [("math_reasoning", "chat", ["count two and two"])],
    }
    for name, rows in files.items():
        lines = [
            json.dumps({"id": f"{name}/{n}", "category": row[0], "format": row[1], "turns": row[2]})
            for n, row in enumerate(rows)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
