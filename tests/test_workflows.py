"""The public CI installs what it asks for, and the package what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"


@pytest.mark.skipif(not WORKFLOW.exists(), reason="an sdist has no workflows")
def test_the_oldest_versions_run_on_the_python_they_are_pinned_for() -> None:
    said = re.search(r"Python (3\.\d+)\.$", (ROOT / "constraints-oldest.txt").read_text(), re.M)
    steps = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["oldest"]["steps"]
    (given,) = (step["with"]["python-version"] for step in steps if "setup-python" in str(step))
    assert said and given == said[1]


@pytest.mark.skipif(not WORKFLOW.exists(), reason="an sdist has no workflows")
def test_every_python_that_the_package_takes_is_tested_and_told() -> None:
    packaging = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', packaging)
    first, last = listed[0], listed[-1]
    major, minor = map(int, last.split("."))
    assert f'requires-python = ">={first},<{major}.{minor + 1}"' in packaging
    for name, job in (("tests", "tests"), ("release", "install")):
        jobs = yaml.safe_load(WORKFLOW.with_name(f"{name}.yml").read_text(encoding="utf-8"))["jobs"]
        assert jobs[job]["strategy"]["matrix"]["python"] == listed
    for page in ("README.md", "docs/get-started/install.md"):
        assert f"Python {first} to {last}." in (ROOT / page).read_text(encoding="utf-8")


def test_what_the_doctor_asks_transformers_for_needs_no_extra() -> None:
    """It builds a model without memory, and transformers then insists on accelerate."""
    packaging = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"accelerate>=' in packaging.partition("[project.optional-dependencies]")[0]


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="an sdist may have none")
def test_make_docs_fails_on_warnings() -> None:
    """``--quiet`` drops the warnings that ``--strict`` counts: broken links would pass."""
    (command,) = re.findall(r"^\t.*\bmkdocs build.*$", (ROOT / "Makefile").read_text(), re.M)
    assert "--strict" in command and not re.search(r"\s(--quiet|-q)\b", command)
