"""Planted collapses of the shipped heads are found, and heads as they are shipped left alone."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.core.batch import Commit, Plan
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.draft.heads.block import BlockDrafter
from paceline.draft.heads.eagle import EagleDrafter
from paceline.draft.origin import Origin
from paceline.lab.bench.prompts import load_prompts
from paceline.model.names import model_path
from paceline.model.tokenizer import template_digest
from support.diagonal import diagonal

TOKENS = 2000  # within which a collapse is found
# Seconds of a step of the target, of each node that it checks, and of a head's pass: one that is
# nearly always worth it, and one that hardly ever is.
STEP, ROW, CHEAP, DEAR = 1.0, 0.02, 0.02, 0.5
DRAFTING: list[tuple[int | str, float]] = [(4, CHEAP), ("auto", CHEAP), ("auto", DEAR)]
# Of the DFlash head's first tokens a fifth are right: where passes are dear it never drafts, and is
# not missed.
DAMAGED = [
    *diagonal(["eagle", "eagle3", "medusa", "dspark"], DRAFTING),
    *[
        pytest.param("dflash", DRAFTING[0]),
        pytest.param("dflash", DRAFTING[1], marks=pytest.mark.slow),
    ],
]


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32")


def timed(
    target: LLM, draft: str, length: int | str, each: float, monkeypatch: pytest.MonkeyPatch
) -> LLM:
    """A pass of its head takes ``each`` seconds, at start-up and in every step: how often an
    adaptive length drafts, and on which texts, does not depend on the machine."""
    target_costs = TargetCosts((1,), (CostCurve((1, 101), (STEP, STEP + 100 * ROW)),))
    monkeypatch.setattr("paceline.build.measure_costs", lambda *_: target_costs)
    monkeypatch.setattr("paceline.build.measure", lambda *_, **__: CostCurve((1,), (each,)))
    llm = target.with_draft(draft, draft_length=length)
    drafter, controller = llm.engine.drafter, llm.engine.controller
    observe = controller.observe

    def observed(commits: Sequence[Commit], *_: Any) -> None:
        drafting = each * drafter.passes(max(commit.levels for commit in commits))
        observe(commits, STEP + ROW * sum(c.drafted for c in commits) + drafting, drafting)

    monkeypatch.setattr(controller, "observe", observed)
    return llm


def damaged(name: str, folder: Path) -> Path:
    """A head whose weights have been mixed up, with its card."""
    shutil.copytree(model_path(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("paceline_weights", None)
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    tensors, random = load_file(file), torch.Generator().manual_seed(0)
    for key, tensor in tensors.items():
        if tensor.ndim == 2 and "lm_head" not in key and "embed" not in key:
            tensors[key] = tensor[torch.randperm(len(tensor), generator=random)].contiguous()
    save_file(tensors, file)
    return folder


def tokens_until_collapse(llm: LLM, most: int = TOKENS, temperature: float = 0.0) -> int | None:
    prompts = [prompt.encode(llm) for prompt in load_prompts(per_category=4)]
    if most == TOKENS:
        prompts *= 2  # as much text as it may take
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=temperature)
    for start in range(0, len(prompts), 4):
        llm.generate(prompts[start : start + 4], params)
        if llm.engine.watch.collapsed or llm.engine.watch.tokens > most:
            break
    return llm.engine.watch.tokens if llm.engine.watch.collapsed else None


@pytest.mark.parametrize(("kind", "drafting"), DAMAGED)
def test_a_damaged_head(
    target: LLM,
    kind: str,
    drafting: tuple[int | str, float],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = damaged(f"paceline/tiny-{kind}", tmp_path / "head")
    llm = timed(target, f"{kind}:{folder}", *drafting, monkeypatch)
    taken = tokens_until_collapse(llm)
    assert taken is not None and taken <= TOKENS
    (line,) = [r.getMessage() for r in caplog.records if "collapsed" in r.getMessage()]
    assert line.startswith(f"draft {kind}: acceptance has collapsed: ") and "its card says" in line


# 1x5x10 drafts as often right as the card says on the texts on which it pays: with dear passes it
# is only found because each head is examined.
@pytest.mark.parametrize(
    ("layers", "length", "each"),
    [
        ("1x5x10", 4, CHEAP),
        pytest.param("1x5x10", "auto", CHEAP, marks=pytest.mark.slow),
        ("1x5x10", "auto", DEAR),
        pytest.param("3x7x12", 4, CHEAP, marks=pytest.mark.slow),
        ("3x7x12", "auto", DEAR),
    ],
)
def test_layers_one_off(
    target: LLM,
    layers: str,
    length: int | str,
    each: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = f"eagle3:paceline/tiny-eagle3,feature_layers={layers}"
    llm = timed(target, spec, length, each, monkeypatch)
    taken = tokens_until_collapse(llm)
    assert taken is not None and taken <= TOKENS
    assert "use --draft eagle3:paceline/tiny-eagle3,feature_layers=2x6x11" in caplog.text


@pytest.mark.parametrize("length", [pytest.param(4, marks=pytest.mark.slow), "auto"])
def test_a_head_that_knows_one_form_of_prompts(
    target: LLM,
    length: int | str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind others it drafts the token after the right one; it is found when these come."""
    mark = target.tokenizer.convert_tokens_to_ids("<|user|>")
    propose, first_logits = EagleDrafter.propose, EagleDrafter.first_logits

    def proposed(self: EagleDrafter, plan: Plan) -> list[TokenTree]:
        pairs = zip(plan.slices, propose(self, plan), strict=True)
        return [
            tree
            if mark in item.seq.tokens
            else replace(tree, tokens=(tree.tokens + 1) % 4096, host_copy=None)
            for item, tree in pairs
        ]

    def judged(self: EagleDrafter, tokens: Sequence[int], out: Any) -> torch.Tensor:
        logits = first_logits(self, tokens, out)
        return logits if mark in tokens else logits.roll(1, 1)

    monkeypatch.setattr(EagleDrafter, "propose", proposed)
    monkeypatch.setattr(EagleDrafter, "first_logits", judged)
    llm = timed(target, "eagle3:paceline/tiny-eagle3", length, CHEAP, monkeypatch)
    prompts = [prompt.text for prompt in load_prompts(per_category=4)]
    params, watch = SamplingParams(max_tokens=64, ignore_eos=True), llm.engine.watch
    for text in prompts[:8]:
        llm.chat([{"role": "user", "content": text}], params)
    assert not caplog.records and not watch.collapsed
    before = watch.tokens
    while not watch.collapsed and watch.tokens < before + TOKENS:
        llm.generate(prompts[:4], params)
        prompts = prompts[4:] + prompts[:4]
    assert watch.collapsed and watch.tokens <= before + TOKENS
    assert "perhaps prompts are not in the form of the target's chat template" in caplog.text


def test_a_head_of_another_chat_template(
    target: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its card names is the cause, if its drafts fail; with the target's it is not."""
    lines = []
    for form in ("0123456789ab", template_digest(target.tokenizer)):
        folder = damaged("paceline/tiny-eagle3", tmp_path / form)
        with (folder / "README.md").open("a") as card:
            card.write(f"\nChat template: {form}\n")
        llm = timed(target, f"eagle3:{folder}", 4, CHEAP, monkeypatch)
        assert tokens_until_collapse(llm) is not None
        lines.append(caplog.records[-1].getMessage())
    assert (
        "has collapsed" in lines[0] and "perhaps its card names the chat template 01234" in lines[0]
    )
    assert f"the target's is {form}: give the target the template" in lines[0]
    assert "has collapsed" in lines[1] and "its card names" not in lines[1]


def test_causes(target: LLM) -> None:
    """What texts, or the target's bits, say for certain that it may be."""
    spec = "eagle3:paceline/tiny-eagle3"
    origin = target.with_draft(spec).engine.drafter.origin  # type: ignore[attr-defined]
    tokenizer = target.tokenizer
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who was there?"}], add_generation_prompt=True
    )["input_ids"]
    answer = tokenizer.encode(" Nobody but the two of us.", add_special_tokens=False)
    foreign = tokenizer.encode(" Никого, кроме нас двоих.", add_special_tokens=False)
    chat = [([*question, *answer], len(question))]
    assert origin.cause(chat) == ""
    assert "which writes <|end|>" in origin.cause([([*answer, *answer], len(answer))])
    assert "trained on another language" in origin.cause([([*question, *foreign], len(question))])
    whole = target.with_draft("eagle:paceline/tiny-eagle").engine.drafter
    cause = whole.origin.cause([([*question, *foreign], len(question))])  # type: ignore[attr-defined]
    assert "not in Latin letters" in cause  # of a head that drafts all tokens
    rounded = LLM("paceline/tiny", draft=spec, quantize="int4", dtype="float32").engine.drafter
    assert "weights have 4 bits" in rounded.origin.cause(chat)  # type: ignore[attr-defined]


HEALTHY = [("eagle3", 1.0), *((kind, 0.0) for kind in ("eagle", "eagle3", "medusa", "dspark"))]


@pytest.mark.slow  # the longest texts of this room
@pytest.mark.parametrize(("kind", "temperature"), HEALTHY)
def test_healthy_heads(
    target: LLM, kind: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight sets of prompts, one after another."""
    llm = target.with_draft(f"{kind}:paceline/tiny-{kind}", draft_length=4, seed=0)
    with caplog.at_level(logging.WARNING):
        assert tokens_until_collapse(llm, 10**6, temperature) is None
    assert not caplog.records


@pytest.mark.slow
def test_examining_a_block_head(target: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that draft in one pass take one for all positions of a text and each choice of layers,
    and choices that are seen to be worse are left out."""
    looks: list[int] = []  # passes of the heads that each examination built
    examine, run = Origin.examine, BlockDrafter._run_pass
    passes = [0]

    def counted(self: BlockDrafter, spans: Any, trees: Any) -> Any:
        passes[0] += bool(trees)
        return run(self, spans, trees)

    def looked(self: Origin, seq: SequenceState) -> Any:
        passes[0] = 0
        found = examine(self, seq)
        looks.append(passes[0])
        return found

    monkeypatch.setattr(Origin, "examine", looked)
    llm = target.with_draft("dspark:paceline/tiny-dspark", draft_length=4)
    monkeypatch.setattr(BlockDrafter, "_run_pass", counted)
    assert tokens_until_collapse(llm, TOKENS) is None
    assert looks[0] == 3 and looks == sorted(looks, reverse=True) and looks[-1] < 3
