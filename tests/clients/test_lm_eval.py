"""lm-eval's ``local-completions``: the likelihoods that it reads from us and from transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.model.names import resolve
from support.served_process import Served

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"text": "Once upon a time there was a", "choices": [" girl", " stone", " 12"], "label": 0},
    {"text": "What is 2 + 2? The answer is", "choices": [" 4.", " 5.", " red."], "label": 0},
    {"text": "She loved to play in the", "choices": [" answer", " garden", " int"], "label": 1},
    {"text": "def add(a, b):\n    return a", "choices": [" + b", " time", " the girl"], "label": 0},
]
CHOICE = """
task: paceline_choice
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: text
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: paceline_rolling
output_type: loglikelihood_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """
task: paceline_until
output_type: generate_until
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: text
doc_to_target: text
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in QUESTIONS), encoding="utf-8")
    for number, task in enumerate((CHOICE, ROLLING, UNTIL)):
        (tmp_path / f"task{number}.yaml").write_text(task % data, encoding="utf-8")
    return tmp_path


def evaluated(tasks: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model,
        model_args=arguments,
        tasks=["paceline_choice", "paceline_rolling", "paceline_until"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert found is not None
    return dict(found)


def test_the_same_task_through_us_and_through_transformers(tiny: Served, tasks: Path) -> None:
    folder = str(resolve(tiny.model))
    # Neither puts a token of its own before a text.
    plain = {"dtype": "float32", "device": "cpu", "add_bos_token": False}
    hf = evaluated(tasks, "hf", {"pretrained": folder, **plain})
    for backend in ("remote", "huggingface"):
        own = {"tokenizer_backend": backend, "num_concurrent": 2, "batch_size": 4}
        if backend == "huggingface":
            own["tokenizer"] = folder
        base = {"base_url": f"{tiny.url}/completions", "model": tiny.model}
        ours = evaluated(tasks, "local-completions", {**base, **own})
        for task, metric in (
            ("paceline_choice", "acc,none"),
            ("paceline_choice", "acc_norm,none"),
            ("paceline_rolling", "bits_per_byte,none"),
        ):
            expected = hf["results"][task][metric]
            assert ours["results"][task][metric] == pytest.approx(expected, abs=1e-4)
        for mine, theirs in zip(*(likelihoods(found) for found in (ours, hf)), strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=2e-3) and mine[1] == theirs[1]
        assert len(ours["samples"]["paceline_until"]) == len(QUESTIONS)


def likelihoods(found: dict[str, Any]) -> list[tuple[float, bool]]:
    """Of every choice: its log-likelihood, and whether it is the greedy continuation."""
    samples = sorted(found["samples"]["paceline_choice"], key=lambda sample: sample["doc_id"])
    return [
        (float(likelihood), str(greedy) == "True")
        for sample in samples
        for likelihood, greedy in sample["filtered_resps"]
    ]
