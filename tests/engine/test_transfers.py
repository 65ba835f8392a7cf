"""A step waits for its device once, and every forward brings what it needs there in one copy.

The device is the host made out to be another one: nothing that it computes differs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import LLM, Grammar, SamplingParams
from paceline.core import transfer
from paceline.draft.heads.block import BlockDrafter
from paceline.draft.heads.eagle import EagleDrafter
from paceline.draft.trees.levels import LevelDrafter
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.diagonal import diagonal
from support.every_drafter import SPECS

PROMPTS = ["Once upon a time there was a", "def add(a, b):\n    return", "one two one two one two"]
LONG = SamplingParams(max_tokens=5, ignore_eos=True)
MIXED = [
    SamplingParams(max_tokens=5, temperature=0.9, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=5, presence_penalty=0.5, ignore_eos=True),
]
LOOKS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
# Who looks at tensors of the host, or does so only where the device is the host.
ON_HOST = {"_replace_nan_rows", "_zero_invalid_rows", "_noise_keys", "row_max"}
ON_HOST |= {
    "_top",
    "learn_scores",
}  # of the search of skipped layers, whose tensors are on the host
VERIFY = "verifier._verdicts"  # the one wait of a step
ROOT = Path(paceline.__file__).parent


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    llm = LLM("paceline/tiny", draft="none", dtype="float32", backend="reference")
    yield llm
    llm.close()


@cache
def ours(file: str) -> str:
    """The name of a file of the package; "" of any other."""
    path = Path(file)
    return path.stem if path.is_relative_to(ROOT) else ""


class Watch:
    """Counts waits by the function that looks, and copies to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: Counter[str] = Counter()
        self.copies = 0
        self.forwards: list[int] = []
        self._inside = False
        for name in LOOKS:
            monkeypatch.setattr(torch.Tensor, name, self._looking(getattr(torch.Tensor, name)))
        upload = transfer.upload

        def counted(host: torch.Tensor, device: Any) -> torch.Tensor:
            self.copies += 1
            return upload(host, device)

        monkeypatch.setattr(transfer, "upload", counted)
        monkeypatch.setattr(transfer, "has_separate_memory", lambda device: True)
        # A cache asks once, when it is made; those here were made before.
        monkeypatch.setattr(PagedCache, "_separate", property(lambda cache: True), raising=False)
        monkeypatch.setattr(CausalModel, "__call__", self._forward(CausalModel.__call__))
        monkeypatch.setattr(EagleDrafter, "_run", self._forward(EagleDrafter._run))

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            file, name = ours(frame.f_code.co_filename), frame.f_code.co_name
            if file and name not in ON_HOST:
                self.waits[f"{file}.{name}"] += 1
            return real(*args, **kwargs)

        return look

    def _forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            before = self.copies
            try:
                return real(*args, **kwargs)
            finally:
                self.forwards.append(self.copies - before)

        return forward


def said(drafter: Any) -> set[str]:
    """The waits that come on top, as each drafter's page says."""
    found: set[str] = set()
    for drafts in getattr(drafter, "members", (drafter,)):
        if isinstance(drafts, LevelDrafter) and drafts._policy.nodes:
            found.add("grow.grow")  # dynamic trees, once they are grown
        if isinstance(drafts, BlockDrafter) and drafts.stops_early:
            found.add("block._grow_trees")  # how long each chain is
    return found


def drafted(llm: LLM, asked: str) -> list[tuple[list[int], int]]:
    """Texts and drafted tokens, of greedy requests or of others."""
    done = llm.generate(PROMPTS, LONG if asked == "greedy" else MIXED)
    return [(one.token_ids, one.stats.drafted_tokens) for one in done]


@pytest.mark.broad
@pytest.mark.parametrize(("name", "asked"), diagonal(list(SPECS), ["greedy", "mixed"]))
def test_one_wait_a_step_and_one_copy_a_forward(
    plain: LLM, name: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drafted(plain.with_draft(SPECS[name], draft_length=3, seed=1), asked)
    llm = plain.with_draft(SPECS[name], draft_length=3, seed=1)
    watch = Watch(monkeypatch)
    engine = llm.engine
    step, steps = engine.step, []

    def watched() -> Any:
        watch.waits.clear()
        commits = step()
        steps.append(dict(watch.waits))
        return commits

    engine.step = watched  # type: ignore[method-assign]
    done = drafted(llm, asked)
    monkeypatch.undo()
    assert done == expected
    assert watch.forwards and set(watch.forwards) == {1}
    for waits in steps:
        assert waits.pop(VERIFY) == 1
        assert waits.keys() <= said(engine.drafter)
        assert all(count == 1 for count in waits.values())


def test_a_plain_step_is_one_copy_and_one_wait(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = plain.with_draft(None)
    watch = Watch(monkeypatch)
    llm.generate(PROMPTS, LONG)
    monkeypatch.undo()
    assert watch.copies == len(watch.forwards) == llm.engine.steps
    assert watch.waits == {VERIFY: llm.engine.steps}


def test_a_grammar_follows_the_draft_while_the_forward_runs(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are on their way before the forward begins; verifying looks at them and at the
    likeliest tokens, which the grammar is asked about."""
    llm = plain.with_draft("ngram", draft_length=3)
    grammar = Grammar("regex", "(one two ){2,9}three")
    watch = Watch(monkeypatch)
    order: list[str] = []
    real = transfer.HostCopy.__init__

    def begun(self: Any, tensor: torch.Tensor) -> None:
        order.append("begun")
        real(self, tensor)

    target = llm.engine.target

    class Target:
        def __call__(self, *args: Any) -> Any:
            order.append("forward")
            return target(*args)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(target, attribute)

    monkeypatch.setattr(transfer.HostCopy, "__init__", begun)
    llm.engine.target = Target()  # type: ignore[assignment]
    (done,) = llm.generate(PROMPTS[2], SamplingParams(max_tokens=40, grammar=grammar))
    monkeypatch.undo()
    assert done.finish_reason == "stop" and done.stats.accepted_tokens > 0
    assert "begun" in order
    after = [order[place + 1] for place, what in enumerate(order) if what == "begun"]
    assert set(after) == {"forward"}
    assert set(watch.waits) == {VERIFY, "transfer.values", "sampling.greedy_tokens"}
