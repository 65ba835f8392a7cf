"""The example drafter as a third-party package: built, installed by pip, used everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LINES = "a dog\n" * 4
USE = f"""
from paceline import LLM, SamplingParams
from paceline.drafters import DRAFTERS, Hybrid, NGram
from paceline.lab.doctor import examine
from paceline.lab.tune.candidates import at_hand

Repeat = DRAFTERS["repeat"]
assert Repeat.__module__ == "my_drafter" and str(Repeat(longest=8)) == "repeat:longest=8"
assert "repeat" in [one.spec for one in at_hand("paceline/tiny", [])]
assert "draft-free" in [one.code for one in examine("paceline/tiny", "repeat")]
plain = LLM("paceline/tiny", dtype="float32", draft_length=4)
(end,) = plain.tokenizer.encode(chr(10), add_special_tokens=False)
bias = {{end: 60.0}}  # empty lines without end: the last one comes again
(wanted,) = plain.generate({LINES!r}, SamplingParams(max_tokens=24, logit_bias=bias))
for draft in ("repeat", Repeat(longest=3), Hybrid(NGram(min=3), Repeat()), ["ngram", "repeat"]):
    llm = plain.with_draft(draft, draft_length=4)
    own = SamplingParams(max_tokens=24, logit_bias=bias, drafter=llm.drafters[-1])
    (found,) = llm.generate({LINES!r}, own)
    assert found.token_ids == wanted.token_ids and found.stats.accepted_tokens > 0, draft
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees the package, as a wheel that was built just now."""
    root = Path(tmp_path_factory.mktemp("package"))
    shutil.copytree(ROOT / "examples", root / "source", ignore=shutil.ignore_patterns("__*"))
    quiet = ["-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(root), str(root / "source")]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = root.glob("*.whl")
    into = root / "site"
    subprocess.run([*pip, "install", *quiet, "--target", str(into), str(wheel)], check=True)
    paths = [str(into), str(ROOT / "src")]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return {**own, "PYTHONPATH": os.pathsep.join(paths)}


def run(words: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_entry_point_is_found_in_python_and_by_the_command_line(
    installed: dict[str, str],
) -> None:
    words = ["generate", LINES, "--model", "paceline/tiny", "--max-tokens", "12"]
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == 0 and plain.stdout
    both = f"{USE}\nfrom paceline.__main__ import main; main()"
    assert run(["-c", both, *words, "--draft", "repeat:longest=4"], installed) == plain.stdout


def test_the_tests_of_all_kinds_run_over_it(installed: dict[str, str]) -> None:
    rooms = ["tests/parity/test_random_models.py", "tests/draft/test_registry.py"]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "repeat", *rooms]
    # Its plugins are not asked for, and take seconds to import.
    assert "passed" in run(words, {**installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
