"""The prompts that SmolLM2's drafts are trained on: what is asked, and what is left out."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2_prompts.py"
WORDS = "The old house stood by the river and nobody had lived there for years. " * 8


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_prompts", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, recipe: ModuleType) -> Path:
    """Two records for every row of the plan, of which one is under a share-alike licence."""
    texts: dict[str, list[dict[str, Any]]] = {}
    for row, (task, name, ask, _, sources) in enumerate(recipe.PLAN):
        for licence in ("MIT", "CC-BY-SA-4.0"):
            text = f"{licence} {row}. {WORDS}"
            if ask is recipe.asked:
                text = f"User: What of {text}\n\nAssistant: The corpus answers."
            elif task == "functions":
                text = f'def f{row}(a, b):\n    """{WORDS}"""\n    return a\n'
            record = {"text": text, "license": licence, "source": f"{sources[0]} {row}"}
            texts.setdefault(name, []).append(record)
    for name, records in texts.items():
        with gzip.open(tmp_path / f"{name}.train.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_prompts_are_questions_of_every_task_without_their_answers(
    recipe: ModuleType, folder: Path
) -> None:
    made = recipe.prompts(folder, 60)
    assert made == recipe.prompts(folder, 60)
    assert {item["task"] for item in made} == {row[0] for row in recipe.PLAN}
    for item in made:
        (message,) = item["messages"]
        assert message["role"] == "user"
        assert item["license"] == "MIT"
        assert "The corpus answers" not in message["content"]
        assert "CC-BY-SA" not in message["content"]
    asked = [item["messages"][0]["content"] for item in made]
    assert len(set(asked)) >= len(asked) - len(recipe.PLAN)
