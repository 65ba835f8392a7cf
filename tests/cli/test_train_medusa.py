"""``paceline train medusa``: its options, and that its heads are used by ``generate``."""

from __future__ import annotations

import json
from pathlib import Path

from support.command_lines import paceline
from support.tiny_models import SENTENCES, TinyPair

SIZES = ["--seq-len=24", "--long-every=0", "--batch-tokens=48", "--micro-tokens=48", "--warmup=1"]
SHORT = [*SIZES, "--steps=3", "--eval-every=2", "--held-out=2", "--held-out-tokens=6"]


def test_a_run_ends_with_heads_that_draft(tiny_pair: TinyPair, tmp_path: Path) -> None:
    corpus, out = tmp_path / "toy.jsonl", tmp_path / "run"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 3))
    files = ["--data", str(corpus), "--valid", str(corpus), "--out", str(out)]
    command = ["train", "medusa", "--model", tiny_pair.target, *files, *SHORT]
    flags = ["--medusa-heads=2", "--medusa-layers=2", "--shared-head", "--threads=1", "--json"]
    result = paceline(*command, *flags)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["parameters"] == 2 * 2 * (32 * 32 + 32)
    assert record["mean_accepted_length"] >= 1
    card = (Path(record["head"]) / "README.md").read_text()
    assert "Medusa heads for `target`" in card and "--draft medusa:FOLDER" in card
    model = ["--model", tiny_pair.target, f"--draft=medusa:{record['head']},nodes=4"]
    limits = ["--draft-length=2", "--max-tokens=6", "--ignore-eos"]
    written = paceline("generate", "The dog", *model, *limits, "--json")
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout)["stats"]["drafted_tokens"] > 0
