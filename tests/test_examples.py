"""The examples run as a user runs them, and say what Paceline says. my_drafter.py as a package:
tests/draft/test_outside_package.py."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import LLM, SamplingParams
from paceline.drafters import DraftModel
from paceline.model.backends import base
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer
from support.diagonal import diagonal
from support.planted_server import PlantedServer, served

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TARGET, DRAFT = "paceline/tiny", "paceline/tiny-draft"
PROMPT = "Once upon a time, there was a little"
# By script: what it prints, its input, and a package that it needs.
SCRIPTS = {
    "first_text.py": (r"60 tokens in [1-5]?\d forwards .*same text, in 60 forwards", "", None),
    "chat.py": (r"you: .+you: .+you: $", "What is 12 + 30?\nTell me a story.\n", None),
    "stream_with_colours.py": (r"\x1b\[32m.+ tokens per step, by drafter \{.*\d", "", None),
    "openai_client.py": (r"whole: .+stream: .+schema: \{'name': .+'age': \d", "", "openai"),
    "my_drafter.py": (r"a = 1.+[1-9]\d* of \d+ drafts were accepted", "", None),
    "custom_controller.py": (r"[1-9]\d* of \d+ drafted tokens were accepted", "", None),
    "custom_backend.py": (r"on numpy: .*[1-9]\d* drafts accepted", "", None),
    "speculative_in_60_lines.py": (r"the text of plain decoding, in \d+ target steps", "", None),
    "certify_another_engine.py": (r"sampling +[1-9].+CERTIFIED", "", None),
    "lm_eval_over_http.py": (r"--draft auto: \d+% right.+--draft none: \d+% right", "", "lm_eval"),
}
WITH_A_SERVER = {"openai_client.py", "certify_another_engine.py", "lm_eval_over_http.py"}
# By notebook: what stands in it, so that a test takes seconds, and what it prints.
NOTEBOOKS = {
    "rag_with_lookups.ipynb": ({}, r"suffix\+ngram, again +144 tokens in +\d\d? forwards"),
    "train_a_head.ipynb": (
        {
            "PROMPTS = 464": "PROMPTS = 12",
            "TOKENS = 192": "TOKENS = 24",
            "STEPS = 140": "STEPS = 2",
        },
        r"eagle3:\S+/run/head.+ forwards of the target: \d\.\d\d a forward",
    ),
}


def as_a_user(words: list[str], said: str = "") -> str:
    """What a program prints that is run in the checkout, with `paceline` on the path."""
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=EXAMPLES.parent,
        env=env,
        input=said,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    scripts = {p.name for p in EXAMPLES.glob("*.py") if "__main__" in p.read_text()} | set(SCRIPTS)
    assert {p.name for p in EXAMPLES.glob("*.py")} - {"local_server.py"} == scripts == set(SCRIPTS)
    assert {p.name for p in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in (*SCRIPTS, *NOTEBOOKS) if f"]({name})" not in page]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in WITH_A_SERVER else ()) for n in SCRIPTS],
)
def test_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, said, package = SCRIPTS[name]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the first lines of {name} say how")
    if name in WITH_A_SERVER:
        printed = as_a_user([f"examples/{name}"], said)
    else:  # torch is loaded here already
        monkeypatch.setattr(base, "_registered", {})  # what it registers ends with it
        monkeypatch.setattr(sys, "argv", [name])
        for _ in range(2):  # beside other work it may not pay to draft, once
            monkeypatch.setattr(sys, "stdin", StringIO(said))
            printed = run(name, capsys)
            if re.search(expected, printed, re.S):
                break
    assert re.search(expected, printed, re.S), printed


@pytest.mark.parametrize(
    "name", ["rag_with_lookups.ipynb", pytest.param("train_a_head.ipynb", marks=pytest.mark.slow)]
)
def test_notebook(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its code cells in one process, one after the other; a line of the shell that fails fails it.
    The text that it prints on stderr belongs to what it says, as in a notebook."""
    changes, expected = NOTEBOOKS[name]
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    code = ["import subprocess, sys"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] or "print(" not in source, "save it with its outputs"
        if source.startswith("!"):
            command = source[1:].replace("\\\n", " ")
            source = f"subprocess.run(f{command!r}, shell=True, check=True, stderr=sys.stdout)"
        code.append(source)
    text = "\n".join(code)
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    script = tmp_path / "notebook.py"
    script.write_text(text, encoding="utf-8")
    printed = as_a_user(["-u", str(script)]) if "subprocess.run(" in text else run(script, capsys)
    assert re.search(expected, printed, re.S), printed


@pytest.mark.parametrize("fault", ["biased", "corrupt"])
def test_an_engine_with_a_fault_is_not_certified(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "certify_another_engine.py"))
    with served(PlantedServer(fault)) as url:
        assert example["certify"](url) == 1
    assert "problem: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(TARGET, draft="none", dtype="float32", draft_length=0)


def run(name: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_sixty_lines_say_what_the_engine_says(
    plain: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    *steps, last = run("speculative_in_60_lines.py", capsys).splitlines()
    (wanted,) = plain.generate(PROMPT, SamplingParams(max_tokens=60))
    found = [(int(line[0]), ast.literal_eval(line[2:])) for line in steps]
    assert "".join(piece for _, piece in found) == wanted.text
    assert sum(count for count, _ in found) == len(wanted.token_ids)
    assert len(steps) < len(wanted.token_ids) / 2
    taken, before = map(int, re.findall(r"\d+", last))
    assert (taken, before) == (len(steps), len(wanted.token_ids))


@pytest.mark.parametrize(("length", "draft"), diagonal([0, 1, 7], [DRAFT, TARGET]))
def test_they_do_so_with_a_seed_and_up_to_a_stop(plain: LLM, length: int, draft: str) -> None:
    """Also where all of a draft holds: the draft model is then the target itself."""
    code = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "speculative_in_60_lines.py")))
    models = [CausalModel.load(name, dtype="float32") for name in (TARGET, draft)]
    prompt = load_tokenizer(TARGET).encode(PROMPT)
    for params in (
        SamplingParams(max_tokens=40, temperature=0.7, seed=5),
        SamplingParams(max_tokens=40, stop_token_ids=[plain.tokenizer.encode(".")[0]]),
    ):
        (wanted,) = plain.generate(PROMPT, params)
        stops = params.stop_token_ids
        readers = [code.Reader(model, prompt, params) for model in models]
        readers[0].seq.stop_ids |= frozenset(stops)
        steps = list(code.decode(*readers, length))
        assert [token for step in steps for token in step] == list(wanted.token_ids)
        assert max(map(len, steps)) == length + 1 or draft == DRAFT


def test_the_controller_changes_lengths_and_no_text(
    plain: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run("custom_controller.py", capsys)
    accepted, drafted = map(int, re.findall(r"\d+", said.splitlines()[-1]))
    assert 0 < accepted < drafted
    made = runpy.run_path(str(EXAMPLES / "custom_controller.py"))["Heuristic"](first=3, longest=6)
    seen: list[int] = []
    chosen = made.lengths
    made.lengths = lambda seqs: seen.extend(chosen(seqs)) or chosen(seqs)
    llm = LLM(TARGET, draft=DraftModel(DRAFT), dtype="float32", controller=made)
    params = SamplingParams(max_tokens=60)
    (found,), (wanted,) = llm.generate(PROMPT, params), plain.generate(PROMPT, params)
    assert found.token_ids == wanted.token_ids
    assert seen[0] == 3 and {5, 6} <= set(seen) <= set(range(1, 7))  # up and down
    assert not made._lengths  # it forgets what has ended
