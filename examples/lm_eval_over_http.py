"""lm-eval on a server of ours: an exam of four questions, with and without speculation.

    pip install "lm-eval[api]"
    python examples/lm_eval_over_http.py [MODEL]

A lossless engine has the same marks with and without drafts, to the last digit; if yours has not,
the exam measures the engine too. Any task of lm-eval goes the same way; this one is written here
so that nothing is downloaded.
"""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from local_server import paceline_serve

QUESTIONS = [
    {"text": "Q: 2 + 3?\nA: 5\nQ: 4 + 4?\nA:", "answer": "8"},
    {"text": "Q: 1 + 6?\nA: 7\nQ: 2 + 2?\nA:", "answer": "4"},
    {"text": "Q: 3 + 3?\nA: 6\nQ: 5 + 4?\nA:", "answer": "9"},
    {"text": "Q: 8 - 5?\nA: 3\nQ: 9 - 2?\nA:", "answer": "7"},
]
TASK = """
task: sums
output_type: generate_until
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: text
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def marks(address: str, model: str, tasks: str) -> tuple[float, list[str]]:
    """The share of right answers, and the answers."""
    # tokenizer_backend=remote: the server cuts texts into tokens, so no tokenizer is needed here.
    arguments = {
        "base_url": f"{address}/v1/completions",
        "model": model,
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
    }
    results = simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=["sums"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
    answers = [sample["filtered_resps"][0] for sample in samples]
    return results["results"]["sums"]["exact_match,none"], answers


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "paceline/tiny"
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder, "questions.jsonl")
        questions.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
        Path(folder, "sums.yaml").write_text(TASK % questions)
        found = {}
        for draft in ("auto", "none"):
            with paceline_serve(model, "--draft", draft) as address:
                found[draft] = marks(address, model, folder)
            print(f"--draft {draft}: {found[draft][0]:.0%} right, {found[draft][1]}")
    assert found["auto"] == found["none"], "speculation changed an answer"
