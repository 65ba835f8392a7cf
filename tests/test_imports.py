"""The layering of the package, and the house rules that a parser can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paceline

pytestmark = pytest.mark.usefixtures("no_collector")

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"

# Who may import whom: a module imports its own room and those below it. A room within a room is
# named with its path; what stands beside it in the outer room has the outer room's name.
LAYERS = (
    {"core", "errors", "files", "settings"},
    {"kernels"},
    {"model/paged"},
    {"model/quantised"},
    {"model/backends"},
    {"model"},
    {"parallel"},
    {"draft/trees"},
    {"draft/base", "draft/spec"},
    {"draft/heads", "draft/vocabulary"},
    {"draft", "verify"},
    {"control"},
    {"engine", "train", "export", "pull"},
    {"draft/auto"},
    {"request"},
    {"async_llm", "llm", "build", "drafters", "settings/tuned"},
    {"lab/report"},
    {"lab"},
    {"server", "distributed"},
    {"cli"},
)
# Alone in their layer: these do not know their neighbours.
STRANGERS = [{"draft", "verify"}, {"control", "verify"}, {"engine", "train"}]
FOREIGN = {
    "typer": {"cli"},
    "rich": {"cli", "request", "lab/report"},
    "fastapi": {"server"},
    "ray": {"distributed"},
}
ROOMS = set().union(*LAYERS)

MODULES = sorted(SOURCE.rglob("*.py"))


def layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def room_of(words: Sequence[str]) -> str:
    """The innermost room of a module, named without the package and by its parts."""
    inner = "/".join(words[:2])
    return inner if inner in ROOMS else words[0]


def part_of(path: Path) -> str:
    if path.stem == "__main__":
        return "cli"  # its front door
    return room_of(path.relative_to(SOURCE).with_suffix("").parts)


@dataclass
class Facts:
    """Of a file: full names of the modules that it imports, anywhere, and how long it is."""

    imports: list[str] = field(default_factory=list)
    functions: dict[str, int] = field(default_factory=dict)  # lines beyond the first
    lines: int = 0


@cache  # read once, not by each test
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def facts(path: Path) -> Facts:
    found = Facts(lines=len(path.read_text(encoding="utf-8").splitlines()))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.imports.append(node.module or "")
            if node.module == "paceline":
                found.imports += [f"paceline.{alias.name}" for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            longest = max(node.end_lineno - node.lineno, found.functions.get(node.name, 0))
            found.functions[node.name] = longest
    return found


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    assert parts <= ROOMS


def imports(paths: Iterable[Path] = MODULES) -> Iterator[tuple[Path, str]]:
    """Files, with a module that each imports."""
    return ((path, module) for path in paths for module in facts(path).imports)


def is_forbidden(part: str, module: str) -> bool:
    """Whether a part may not import this: it lies above, beside, or is another's library."""
    words = module.split(".")
    if words[0] in FOREIGN:
        return part not in FOREIGN[words[0]]
    if words[0] != "paceline" or len(words) < 2:
        return False
    if not ((SOURCE / words[1]).is_dir() or (SOURCE / f"{words[1]}.py").is_file()):
        return False  # a name of the public API, as in `from paceline import LLM`
    other = room_of(words[1:])
    outer = {other.split("/")[0], part.split("/")[0]}
    return other != part and (layer(other) > layer(part) or outer in STRANGERS)


def test_imports_go_downwards() -> None:
    named = ((path, module) for path, module in imports() if part_of(path) != "__init__")
    assert not [(name(p), module) for p, module in named if is_forbidden(part_of(p), module)]


@pytest.mark.parametrize("module", ["rich.table", "paceline.server.app", "paceline.draft.base"])
def test_a_forbidden_import_is_seen(module: str) -> None:
    assert is_forbidden("verify", module) and not is_forbidden("verify", "paceline.core.tree")


# Of the engine's rooms the lab imports the homes of public names only. Parts that keep to that, and
# what each still imports besides: modules, or a whole room.
INNER = ("core", "model", "draft", "verify", "control", "engine", "request", "parallel", "train")
PUBLIC_HOMES = {"core/stages"} | {
    home.removeprefix("paceline.").replace(".", "/") for home in paceline._HOMES.values()
}
PUBLIC_ONLY: dict[str, set[str]] = {
    "lab/report": set(),
    "lab/bench": set(),
    # What it judges: the rule, drafters' trees, rows of the target's forward; former keywords.
    "lab/certify": {
        "control/controller",
        "core/batch",
        "core/keywords",
        "core/noise",
        "core/sampling",
        "core/sequence",
        "core/tree",
        "draft/base",
        "engine/engine",
        "model/paged/cache",
        "model/target",
        "verify/verifier",
    },
    "lab/budget": set(),
    "lab/perplexity": {"core/batch", "model/target", "train/data"},
    "lab/demo": {"core/sequence", "draft/base", "draft/suffix", "model/names"},
    "lab/replay": {"request/receipt"},
    "lab/quantize": {
        "model/loading",
        "model/precision",
        "model/probe",
        "model/quantised/formats",
        "model/quantised/convert",
        "model/quantised/rounding",
        "model/target",
    },
    "lab/export": {  # heads in other layouts; sizes of a target that is not loaded; former keywords
        "core/keywords",
        "draft/auto",
        "draft/heads/block_head",
        "draft/heads/eagle_head",
        "draft/heads/medusa_head",
        "draft/spec",
        "model/gguf",
        "model/loading",
        "model/names",
        "model/tokenizer",
    },
    # Which models there are, which one was tuned, and forwards measured alone.
    "lab/tune": {"model/names", "model/measure"},
    "lab/profiling": {"model/loading", "model/measure", "model/paged/cache", "model/precision"},
    "lab/doctor": {  # what loading checkpoints asks of them, batches for a few layers and heads
        "core/batch",
        "core/costs",
        "core/memory",
        "core/sequence",
        "draft/auto",
        "draft/foreign",
        "draft/heads/checkpoint",
        "draft/heads/eagle_head",
        "draft/heads/mtp",
        "draft/spec",
        "draft/vocabulary",
        "model",
        "parallel/processes",
    },
}


@pytest.mark.parametrize("part", PUBLIC_ONLY)
def test_the_lab_imports_public_names_only(part: str) -> None:
    allowed = PUBLIC_ONLY[part] | PUBLIC_HOMES
    paths = [path for path in MODULES if name(path).startswith(part)]
    inner = [
        (name(path), module.removeprefix("paceline.").replace(".", "/"))
        for path, module in imports(paths)
        if module.startswith("paceline.")
    ]
    rooms = set(INNER) - PUBLIC_ONLY[part]
    assert not [(p, m) for p, m in inner if m.split("/")[0] in rooms and m not in allowed]


LIBRARIES = {"_exit", "_modules", "_tokenizer"}  # of os, torch and transformers


def private_names(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Names with one underscore of a file: those that its classes have, and those it uses of other
    objects than ``self``, or imports from another of our files."""
    members, used = set(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            members |= {item.name for item in node.body if isinstance(item, functions)}
            fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
            members |= {field.id for field in fields if isinstance(field, ast.Name)}
        elif isinstance(node, ast.Attribute):
            inside = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not inside:
                used.add(node.attr)
            elif isinstance(node.ctx, ast.Store):
                members.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
            used |= {f"{alias.name} of {node.module}" for alias in node.names}
    return tuple(
        frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))
        for names in (members, used)
    )


def test_what_is_private_stays_in_its_file() -> None:
    names = {name(path): private_names(path) for path in MODULES}
    members = frozenset[str]().union(*(mine for mine, _ in names.values()))
    assert not [
        (path, word)
        for path, (mine, used) in names.items()
        for word in used - LIBRARIES - mine
        if " of " in word or word in members
    ]


def test_backends_are_reached_through_their_protocol() -> None:
    """What is in a backend's folder is its own: the registry finds it by name."""
    native = "paceline.model.backends.native"
    others = [path for path in MODULES if not name(path).startswith("model/backends/native")]
    assert not [(name(p), module) for p, module in imports(others) if module.startswith(native)]


def test_no_files_import_each_other_in_a_circle() -> None:
    """An import in a function, or for type checkers alone, hides a circle; it does not open it."""
    known = {
        ".".join(("paceline", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in MODULES
        if part_of(path) != "__init__"
    }
    graph = {
        module: {
            found
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ImportFrom)
            for found in (node.module, *(f"{node.module}.{own.name}" for own in node.names))
            if found in known
        }
        for module, path in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of the circle


def test_only_the_top_row_uses_the_public_api() -> None:
    top = {"cli", "server", "__init__"}
    assert not [name(p) for p, m in imports() if m == "paceline" and part_of(p) not in top]


def test_core_needs_torch_numpy_and_the_standard_library_only() -> None:
    known = {"paceline", "torch", "numpy", *sys.stdlib_module_names}
    core = [path for path in MODULES if part_of(path) == "core"]
    assert core
    assert not [
        (name(p), module) for p, module in imports(core) if module.split(".")[0] not in known
    ]


def test_files_and_functions_stay_short() -> None:
    assert not {name(path): facts(path).lines for path in MODULES if facts(path).lines > 400}
    functions = [(name(path), *item) for path in MODULES for item in facts(path).functions.items()]
    assert not [function for function in functions if function[-1] >= 60]


def test_no_module_is_a_drawer_for_everything() -> None:
    assert not [p for p in MODULES if p.stem in {"utils", "util", "helpers", "misc", "common"}]


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded once ``code`` has run in a fresh interpreter."""
    script = f"import sys\n{code}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors"}


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = """
from typer.main import get_command
from paceline.cli.main import app
def ask(group, *words):
    for name, command in group.commands.items():
        try:
            app([*words, name, "--help"])
        except SystemExit as end:
            assert end.code == 0
        if hasattr(command, "commands"):
            ask(command, *words, name)
ask(get_command(app))
"""
    loaded = modules_after(code)
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "fastapi", "uvicorn", "starlette"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import paceline\npaceline.SamplingParams\npaceline.PromptError\npaceline.__version__"
    assert not modules_after(code) & HEAVY


def test_a_model_adapter_loads_no_command_line() -> None:
    """Nor transformers before there is a model."""
    others = {"typer", "fastapi", "ray", "transformers"}
    assert not modules_after("import paceline.llm, paceline.model.target") & others


def test_docstrings_can_be_written_as_bytes() -> None:
    """From Python 3.13 on a lone surrogate in one keeps its file from being imported."""
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                (ast.get_docstring(node) or "").encode()
