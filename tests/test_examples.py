"""The examples run, and say what Paceline says. my_drafter.py: tests/draft/test_outside_package.py;
examples/hub: tests/integrations."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import LLM, SamplingParams
from paceline.drafters import DraftModel
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TARGET, DRAFT = "paceline/tiny", "paceline/tiny-draft"
PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(TARGET, draft="none", dtype="float32", draft_length=0)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
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


@pytest.mark.parametrize("draft", [DRAFT, TARGET])
@pytest.mark.parametrize("length", [0, 1, 7])
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


def test_a_backend_in_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    said = run("custom_backend.py", capsys)
    assert "on numpy: " in said and not said.endswith(": 0 drafts accepted\n")
