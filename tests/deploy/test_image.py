"""The image: its steps in an environment without a compiler, and built where a tool can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
BUILDS = next(line for line in STEPS.splitlines() if "paceline.kernels" in line)
IMAGE = "paceline-test-of-the-image"


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd="/"
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage leaves behind, by its own command."""
    words = BUILDS.removeprefix("RUN python").split()
    done = run([sys.executable, *words], **os.environ)
    assert done.returncode == 0, done.stderr
    library = Path(done.stdout.strip().splitlines()[-1])
    kept = tmp_path_factory.mktemp("image") / "kernels"
    shutil.copytree(library.parent, kept / library.parent.name)
    return kept


def clean(home: Path, kernels: Path) -> dict[str, str]:
    """The environment of the second stage: no compiler, nothing of this user's."""
    (home / "bin").mkdir(parents=True, exist_ok=True)
    kept = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    return kept | {
        "PATH": str(home / "bin"),
        "HOME": str(home),
        "PACELINE_CACHE": str(home / "cache"),
        "PACELINE_NATIVE_CACHE": str(kernels),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


ASK = """
from paceline import LLM
llm = LLM("paceline/tiny")
print(llm.target.backend_reason)
print(llm.generate("Once upon a time")[0].finish_reason)
"""


@pytest.mark.slow  # a built image
def test_the_kernels_are_found_without_a_compiler(built: Path, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", ASK], **clean(tmp_path, built))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("native ("), done.stdout + done.stderr


@pytest.mark.slow
def test_an_image_without_them_says_what_it_lacks(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", ASK], **clean(tmp_path, tmp_path / "none"))
    assert done.stdout.startswith("reference (no g++ is there)"), done.stdout + done.stderr


def test_the_stages_agree() -> None:
    """The second stage gets a folder whole, at the same place, and the kernels are in it."""
    (copied,) = re.findall(r"COPY --from=build (\S+) (\S+)", STEPS)
    folders = set(re.findall(r"PACELINE_NATIVE_CACHE=(\S+)", STEPS))
    assert copied[0] == copied[1] and len(folders) == 1
    assert folders.pop().startswith(copied[0] + "/")
    *_, cache = re.findall(r"PACELINE_CACHE=(\S+)", STEPS)  # of the image; a build step has another
    assert f"--owner paceline --group paceline {cache}" in STEPS
    for name in ("helm/paceline/templates/deployment.yaml", "kubernetes/paceline.yaml"):
        assert f"mountPath: {cache}\n" in (ROOT / "deploy" / name).read_text(encoding="utf-8")
    unit = (ROOT / "deploy" / "paceline.service").read_text(encoding="utf-8")
    assert "CacheDirectory=paceline" in unit and "PACELINE_CACHE=/var/cache/paceline" in unit


def test_the_build_imports_modules_that_exist() -> None:
    (imports,) = re.findall(r'python -c "(import paceline\..*)"', STEPS)
    done = run([sys.executable, "-c", imports], **os.environ)
    assert done.returncode == 0, done.stderr


def test_the_image_is_built_where_a_tool_can() -> None:
    tool = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if tool is None or run([tool, "info"], **os.environ).returncode:
        pytest.skip("no container engine runs here")
    build = [tool, "build", "-f", str(ROOT / "deploy" / "Dockerfile"), "-t", IMAGE, str(ROOT)]
    assert subprocess.run(build, timeout=1800).returncode == 0
    ask = [tool, "run", "--rm", "--read-only", "--entrypoint", "python", IMAGE, "-c", ASK]
    assert run(ask, **os.environ).stdout.startswith("native (")
