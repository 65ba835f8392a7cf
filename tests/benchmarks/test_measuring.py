"""What the benchmarks share: turns, ratios, files of records."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from measuring import (
    OtherLoad,
    alternate,
    append_record,
    finish,
    median_ratio,
    read_records,
    rotated,
)

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = [file for file in sorted(FOLDER.glob("*.py")) if "parse_args(" in file.read_text()]


def test_all_run_in_every_round_in_rotated_order() -> None:
    diary: list[str] = []

    def run(name: str) -> float:
        diary.append(name)
        return float(len(diary))

    found = alternate({name: lambda name=name: run(name) for name in "abc"}, rounds=2)
    assert "".join(diary) == "abcbcacab"  # the first three warm up
    assert found == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}
    assert rotated("abcd", 5) == ["b", "c", "d", "a"]


def test_ratios_are_of_rounds() -> None:
    assert median_ratio([2.0, 30.0, 9.0], [1.0, 10.0, 3.0]) == 3.0


def test_records_continue_after_a_truncated_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs" / "cells.jsonl"
    assert read_records(None) == read_records(str(file)) == []
    for number in range(2):
        append_record(str(file), {"n": number})
    with file.open("a") as out:
        out.write('{"n": 2')
    assert read_records(str(file)) == [{"n": 0}, {"n": 1}]
    finish({"n": 3}, tmp_path / "last.json")
    assert json.loads((tmp_path / "last.json").read_text()) == {"n": 3}
    assert capsys.readouterr().out == '{"n": 3}\n'


def test_the_load_of_other_processes_is_measured() -> None:
    cores = OtherLoad().cores()
    assert cores is None or cores >= 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_prints_its_options(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(script.stem).main()
    assert ended.value.code in (0, None) and "--help" in capsys.readouterr().out


FORMER = "--target", "--tokens", "--prompts", "--length", "--drafts", "--sequences", "--batches"


def test_options_have_the_names_of_the_commands() -> None:
    """Former names stand behind ours; a text of perplexity.py has --tokens, and no answer."""
    firsts = {
        (file.name, name)
        for file in FOLDER.glob("*.py")
        for name in re.findall(r'\badd(?:_argument)?\(\s*"(--[a-z-]+)"', file.read_text())
    }
    assert ("native.py", "--concurrency") in firsts
    assert {one for one in firsts if one[1] in FORMER} == {("perplexity.py", "--tokens")}


def test_what_the_scripts_import_from_the_package_is_there() -> None:
    scripts = FOLDER.glob("*.py")
    imports = [
        (script.name, node.module, name.name)
        for script in scripts
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline")
        for name in node.names
    ]
    absent = []
    for script, module, name in imports:
        if not hasattr(import_module(module), name) and not find_spec(f"{module}.{name}"):
            absent.append((script, module, name))
    assert len(imports) > 50 and not absent
