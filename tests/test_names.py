"""One name for one thing: no two public classes share one, and nobody imports one as another."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
READ = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
Trees = dict[Path, ast.Module]

pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Not made while tests are collected, which every process does, nor kept behind these tests."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(READ)}


def where(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def classes(trees: Trees) -> dict[str, list[str]]:
    """Where the package defines each public class or type, by name, nested ones included."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        if SOURCE in path.parents:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(where(path, node))
    return found


def type_names(trees: Trees) -> dict[str, set[str]]:
    """What modules of the package assign to names spelt like classes: aliases, type variables."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if SOURCE in path.parents:
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    name = node.targets[0].id
                    if name[0].isupper() and not name.isupper():
                        found[name].add(f"{where(path, node)} = {ast.unparse(node.value)}")
    return found


def test_no_two_public_classes_share_a_name(trees: Trees) -> None:
    shared = {name: places for name, places in classes(trees).items() if len(places) > 1}
    assert not shared


def test_no_type_alias_has_the_name_of_a_class_or_of_another_type(trees: Trees) -> None:
    known = classes(trees)
    assert not {name: places for name, places in type_names(trees).items() if name in known}
    meanings = {
        name: {place.split(" = ")[1] for place in places}
        for name, places in type_names(trees).items()
    }
    assert not {name: found for name, found in meanings.items() if len(found) > 1}


def test_no_class_is_imported_under_another_name(trees: Trees) -> None:
    known, wrong = classes(trees), []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            ours = (node.module or "").split(".")[0] == "paceline"
            for name in node.names:
                if name.asname is None or name.asname == name.name:
                    continue
                if name.asname in known or (ours and name.name in known):
                    wrong.append(f"{where(path, node)}: {name.name} as {name.asname}")
    assert not wrong
