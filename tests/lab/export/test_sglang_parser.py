"""Exports through SGLang's own argument parser, where its wheel lies.

``pip install --no-deps --target DIR sglang`` (it takes Linux and Python 3.11), then
``PACELINE_TEST_SGLANG=DIR``; an installed one is found by itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.draft.heads.block_head import BlockConfig, load_block
from paceline.drafters import parse_draft
from paceline.lab.export import export
from paceline.lab.export.speculation import shape_of

SCRIPT = Path(__file__).with_name("sglang_parser.py")
DRAFTS = (
    ("eagle3:paceline/tiny-eagle3", "auto"),
    ("eagle3:paceline/tiny-eagle3,nodes=0", "block"),
    ("eagle3:paceline/tiny-eagle3,nodes=16,width=3", "auto"),
    ("eagle:paceline/tiny-eagle", "token"),
    ("dflash:paceline/tiny-dflash", "auto"),
    ("dspark:paceline/tiny-dspark", "block"),
    ("paceline/tiny-draft", "block"),
    ("tree:paceline/tiny-draft,branching=2x2x1", "auto"),
    ("ngram:min=2,max=3", "auto"),
)


@pytest.fixture(scope="module")
def folder() -> str:
    named = os.environ.get("PACELINE_TEST_SGLANG")
    if named is None:
        module = find_spec("sglang")
        named = module and module.origin and str(Path(module.origin).parents[1])
    if not named or not (Path(named) / "sglang").is_dir():
        pytest.skip("SGLang's wheel is not here (PACELINE_TEST_SGLANG)")
    return named


def parsed(folder: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("draft", "rule"), DRAFTS)
def test_what_is_exported_is_parsed_to_what_was_meant(
    folder: str, draft: str, rule: str, tmp_path: Path
) -> None:
    made = export("sglang", "paceline/tiny", draft, draft_length=4, rule=rule, out=tmp_path)
    assert made.command[:3] == ["python", "-m", "sglang.launch_server"]
    run = parsed(folder, made.command[3:])
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    values: dict[str, Any] = said["values"]
    for name, value in made.config.items():
        assert str(values[name]) == str(value)
    known = re.findall(r"[A-Z0-9]{4,}", said["algorithms"])
    assert values["speculative_algorithm"] in known
    assert values["speculative_accept_threshold_single"] == 1.0, "or it would not be lossless"
    assert values["model_path"] == made.command[made.command.index("--model-path") + 1]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_its_reader_takes_the_layers_and_blocks_of_a_head(
    folder: str, kind: str, tmp_path: Path
) -> None:
    """The feature layers numbered by outputs, which is one less."""
    spec = parse_draft(f"{kind}:paceline/tiny-{kind}")
    export("sglang", "paceline/tiny", str(spec), draft_length=4, out=tmp_path)
    run = parsed(folder, ["head", str(tmp_path / "head")])
    if "No module named 'msgspec'" in run.stderr:
        pytest.skip("SGLang's reader needs msgspec")
    assert run.returncode == 0, run.stderr
    said, ours = json.loads(run.stdout), spec_head(spec)
    assert said["gamma"] == ours.block_size
    assert said["target_layer_ids"] == [layer - 1 for layer in ours.feature_layers]
    assert said["mask_token_id"] == ours.mask_token
    assert said["markov_rank"] == ours.markov_rank


def spec_head(spec: Any) -> BlockConfig:
    return load_block(spec.path, shape_of("paceline/tiny")[0], spec.kind).config


def test_it_is_a_parser_that_refuses(folder: str) -> None:
    good = ["--model-path", "there", "--speculative-num-steps", "4"]
    assert parsed(folder, good).returncode == 0
    assert "unrecognized" in parsed(folder, [*good, "--speculative-num-stepz", "4"]).stderr
    assert "invalid int" in parsed(folder, [*good[:3], "four"]).stderr
