"""Documentation that cannot lie: its commands exist, its examples run, its names and links hold."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest
import typer.main
from pydantic import TypeAdapter
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.draft.spec import DraftSpec
from paceline.drafters import DRAFTERS, RECORDS, parse_draft
from paceline.files import read_toml
from paceline.model.names import EMBEDDED, has_assets
from paceline.server.app import create_app
from paceline.server.config import ServeConfig
from support.tiny_models import TinyPair

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "archive"),
]


SERVICE: Any = MagicMock(config=ServeConfig())  # for the routes, without an engine


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language in all pages."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.M | re.S)
    return [block for page in PAGES for block in fence.findall(page.read_text(encoding="utf-8"))]


# Commands among what is shown: text blocks have output, too.
_SHOWN_COMMANDS = re.compile(r"^(?:paceline [a-z]|curl |pip |python |docker )(?:.*\\\n)*.*", re.M)


def command_lines(language: str) -> list[str]:
    """The commands in blocks of a language, each with its further lines."""
    lines, begun = list[str](), ""
    for block in blocks(language):
        found = _SHOWN_COMMANDS.findall(block) if language == "text" else [block]
        for line in "\n".join(found).replace("\\\n", " ").splitlines():
            begun += line
            try:
                words = shlex.split(begun, comments=True)
            except ValueError:  # within quotes
                begun += "\n"
                continue
            lines += [shlex.join(words)] if words else []
            begun = ""
        assert not begun, begun
    return lines


_SHELLS = ("sh", "bash", "text")


def commands(program: str, *languages: str) -> list[str]:
    lines = [line for language in languages or ("sh",) for line in command_lines(language)]
    return sorted({line for line in lines if line.split(" ")[0] == program})


# What is run or parsed, and what is shown: output, files, and shells with other programs.
_RUN, _SHOWN = {"sh", "python"}, {"text", "bash", "json", "jsonl", "toml", "yaml", "promql"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_code_block_is_run_or_marked_as_output(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.M)
    assert set(fences[::2]) <= _RUN | _SHOWN and not any(fences[1::2])


def pair_or_stand_in(text: str, pair: TinyPair) -> str:
    """Commands and examples as written, with the toy in place of the model that must be pulled;
    random models stand in where the weights are missing."""
    text = text.replace("paceline/smollm2", EMBEDDED)
    if has_assets(EMBEDDED):
        return text
    return text.replace(f"{EMBEDDED}-draft", pair.draft).replace(EMBEDDED, pair.target)


# What needs a running server, tuned settings or a file made before is run by tests of its own.
_ELSEWHERE = ("openai", "tuned.toml", "-int8", "--tensor-parallel", "adapters/")


def stands_alone(text: str) -> bool:
    return not any(word in text for word in _ELSEWHERE)


@pytest.mark.parametrize("code", [c for c in blocks("python") if stands_alone(c)])
def test_python_examples_run(
    code: str, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("example")  # where dataclasses look up what annotations mean
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(pair_or_stand_in(code, tiny_pair), "example", "exec"), vars(module))


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    dry = ["make", "--no-print-directory", "-n", *shlex.split(command)[1:]]
    done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_alone_prints_the_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check", "bench"):
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize("command", commands("paceline", *_SHELLS))
def test_commands_parse(command: str) -> None:
    """Every option, argument and spec shown is known; nothing is run."""
    words = shlex.split(command)[1:]
    if words[-1] == "...":  # what is left out is needed
        words[-1:] = ["--data", "x", "--out", "x"]
    current: Any = typer.main.get_command(app)
    while hasattr(current, "commands"):
        current = current.commands[words.pop(0)]
    if "--help" not in words:
        current.make_context("paceline", words)
    for option, value in pairwise(words):
        if option == "--draft" and re.match(rf"({'|'.join(DRAFTERS)})\b", value):
            parse_draft(value)


def check_pip(words: list[str]) -> None:
    extras = read_toml(ROOT / "pyproject.toml", "")["project"]["optional-dependencies"]
    place, _, extra = words[1].partition("[")
    assert (
        place in ("paceline", "torch", "vllm-router") or (ROOT / place / "pyproject.toml").exists()
    )
    assert not extra or {*extra.rstrip("]").split(",")} <= {*extras}


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "example", "exec")
    elif words[0] != "-m":
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words[1:] if word.startswith("-"))


def check_curl(words: list[str]) -> None:
    """The path is one of the server's, the body one that it accepts."""
    routes: dict[str, Any] = {getattr(r, "path", ""): r for r in create_app(SERVICE).routes}
    route = routes[urlsplit(words[0]).path]
    assert "Content-Type: application/json" in words
    (parameter,) = route.dependant.body_params
    TypeAdapter(parameter.field_info.annotation).validate_json(words[words.index("-d") + 1])


def check_docker(words: list[str]) -> None:
    if words[0] == "build":
        assert (ROOT / words[words.index("-f") + 1]).is_file() and (ROOT / words[-1]).is_dir()
    else:
        assert words[0] == "push"


def check_ray_serve(words: list[str]) -> None:
    module, _, name = words[1].partition(":")
    assert f"def {name}(" in (ROOT / "deploy" / f"{module}.py").read_text(encoding="utf-8")


# How each program's arguments are checked; "paceline", "make" and what others test are not here.
CHECKS: dict[str, Callable[[list[str]], object]] = {
    **{"pip": check_pip, "python": check_python, "python3": check_python, "curl": check_curl},
    **{"docker": check_docker, "serve": check_ray_serve},
    "helm": lambda words: (ROOT / words[2] / "Chart.yaml").read_text(encoding="utf-8"),
    "cd": lambda words: next((ROOT / words[0]).iterdir()),
}
# Other programs: the environment and the export that the line before made, a router (tests/deploy).
_TESTED = {"paceline", "make", ".", "sh", "echo", "vllm-router"}
_OTHERS = [line for shell in _SHELLS for line in command_lines(shell)]


@pytest.mark.parametrize("command", sorted({x for x in _OTHERS if x.split(" ")[0] not in _TESTED}))
def test_commands_of_other_programs(command: str) -> None:
    program, *words = shlex.split(command)
    CHECKS[program](words)


# These take minutes, serve for ever or talk to somebody; they have tests of their own.
_LONG = {
    "pull",
    "train",
    "datastore",
    "serve",
    "bench",
    "tune",
    "certify",
    "profile",
    "doctor",
    "quantize",
}


def is_cheap(command: str) -> bool:
    words = shlex.split(command)
    if not stands_alone(command) or "MODEL" in words:
        return False
    return words[1] not in _LONG and words not in (["paceline", "chat"], ["paceline", "demo"])


@pytest.mark.parametrize("command", [c for c in commands("paceline") if is_cheap(c)])
def test_cheap_commands_run(command: str, tiny_pair: TinyPair) -> None:
    words = shlex.split(pair_or_stand_in(command, tiny_pair))[1:]
    if not has_assets(EMBEDDED):
        words += ["--model", tiny_pair.target]
        if "--draft" not in words:
            words += ["--draft", tiny_pair.draft]
    if words[0] == "demo" and "--max-tokens" not in words:
        words += ["--max-tokens", "16"]  # in full it takes half a minute
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() or "--json" not in words


def links(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert not missing


def test_the_tour_names_what_exists() -> None:
    """Each identifier of the tour occurs in one of the files that its paragraph links to."""
    page = ROOT / "docs" / "contributing" / "tour.md"
    source = "\n".join((page.parent / link).read_text(encoding="utf-8") for link in links(page))
    words = re.findall(r"`([A-Za-z_][\w.]*)`", page.read_text(encoding="utf-8"))
    assert len(words) > 25
    for word in words:
        name = word.rpartition(".")[2]
        defined = rf"(class|def) {name}\b|^ *{name} *[:=]"
        assert re.search(defined, source, re.M), f"`{word}` is not in the code"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_every_drafter_has_a_page(record: type[DraftSpec]) -> None:
    """It shows the kind as a spec, and the table of drafters links to it."""
    table = (ROOT / "docs" / "drafters" / "README.md").read_text(encoding="utf-8")
    page = record.page or f"{record.kind}.md"
    text = (ROOT / "docs" / "drafters" / page).read_text(encoding="utf-8")
    assert re.search(rf"`{record.kind}\b|--draft {record.kind}\b|\"{record.kind}\"", text)
    assert page == "README.md" or f"]({page})" in table
    assert record.__name__ in table or record.kind == "none"
