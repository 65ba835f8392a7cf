"""A collapse of the acceptance rate is detected, and nothing else is mistaken for one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.adapter import Adapter
from paceline.core.batch import Commit
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.collapse import CollapseWatch, WatchedDrafter
from paceline.draft.origin import Origin

KEY = ("head", None, 0)


def watch_of(stated: float | None = None, **known: Any) -> CollapseWatch:
    watch = CollapseWatch()
    watch.drafters["head"] = WatchedDrafter(stated, **known)
    return watch


def sequence(number: int, **params: Any) -> SequenceState:
    return SequenceState(number, [1] * 106, 10, SamplingParams(**params))


def run(
    watch: CollapseWatch, rate: float, drafts: int, first: int = 0, each: int = 40, **params: Any
) -> int | None:
    """Record drafts of which the share ``rate`` is right, ``each`` per request; returns after how
    many a collapse was detected."""
    chooser = random.Random(first)
    for number in range(drafts):
        if number % each == 0:
            seq = sequence(1000 + first + number // each, **params)
        right = chooser.random() < rate
        commit = Commit(seq.seq_id, (1, 1) if right else (1,), (0,) if right else (), reached=1)
        watch.record("head", seq, commit)
        if KEY in watch.collapsed:
            return number
    return None


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline"]


@pytest.mark.parametrize("stated", [0.84, 0.5, 0.2])
def test_a_head_far_below_its_card(stated: float, caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of(stated, cause=lambda seq: "perhaps this")
    took = run(watch, 0.05 * stated, 1500)
    assert took is not None and took < 40 + 80 / stated
    (line,) = lines(caplog)
    assert line.startswith("draft head: acceptance has collapsed: ")
    assert line.endswith(f"its card says {stated:.0%}; perhaps this")


def test_an_adapter_that_is_loaded_again_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of(0.8)
    adapters = [Adapter("sql", "folder", {}) for _ in range(2)]
    for count, adapter in enumerate(adapters, 1):
        for number in range(100):
            seq = SequenceState(number, [1] * 100, 10, SamplingParams(lora="sql"), adapter=adapter)
            assert number or not watch.is_paused("head", seq)
            watch.record("head", seq, Commit(seq.seq_id, (1,), (), reached=1))
        assert watch.is_paused("head", seq) and len(lines(caplog)) == count


def test_a_fall_from_its_own_level(caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of()
    assert run(watch, 0.7, 1000) is None
    took = run(watch, 0.03, 1000, first=1)
    assert took is not None and took < 200
    (line,) = lines(caplog)
    assert "before it was 6" in line and "paceline bench" in line


@pytest.mark.parametrize("stated", [0.84, 0.5, 0.2])
def test_healthy_ones_are_left_alone(stated: float) -> None:
    """Alternating tasks, some with half of the usual rate, and sampled requests."""
    for seed in range(10):
        watch = watch_of(stated)
        for task in range(30):
            share = (1.0, 0.5, 0.8, 0.4, 1.1)[task % 5]
            assert run(watch, min(1.0, share * stated), 200, first=1000 * seed + 10 * task) is None


def test_one_odd_text_proves_nothing() -> None:
    watch = watch_of(0.8)
    assert run(watch, 0.0, 5000, each=10_000) is None
    assert run(watch_of(0.8), 0.0, 5000, each=2000) is not None


@pytest.mark.parametrize("params", [{"temperature": 1.5}, {"prediction": (1, 2)}])
def test_drafts_that_show_nothing(params: dict[str, Any]) -> None:
    assert run(watch_of(0.8), 0.0, 1000, **params) is None


def test_adapters_are_apart() -> None:
    watch = watch_of(0.8)
    for number in range(400):
        seq = sequence(number // 20, lora="fine")
        watch.record("head", seq, Commit(seq.seq_id, (1,), reached=1))
        run(watch, 0.8, 1, first=number)
    assert set(watch.collapsed) == {("head", "fine", 0)}


def test_it_may_recover_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of(0.8)
    for round_number in range(3):
        assert run(watch, 0.0, 1000, first=2 * round_number) is not None
        for number in range(400):
            right = Commit(1, (1, 1), (0,), reached=1)
            watch.record("head", sequence(10**6 + number), right)
        assert not watch.collapsed
    assert len(lines(caplog)) == 1


def test_a_doubt_is_examined_and_only_what_is_certain_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def examine(wrong: str) -> Any:
        def on(seq: SequenceState) -> tuple[Iterable[bool], str]:
            asked.append(seq.seq_id)
            return [True, False] * 20, wrong

        return on

    assert run(watch_of(0.8, examine=examine("")), 0.6, 3000) is None
    assert 1 <= len(asked) == len(set(asked)) <= 8
    asked.clear()
    assert run(watch_of(0.5, examine=examine("")), 0.6, 3000) is None
    assert asked  # one without a doubt, too, in the end
    asked.clear()
    took = run(watch_of(0.8, examine=examine("the layers are one off")), 0.6, 3000)
    assert took is not None and len(asked) == 1
    assert lines(caplog)[-1].endswith("its card says 80%; the layers are one off")


def test_an_examination_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def fails(seq: SequenceState) -> Any:
        raise ValueError("no room")

    assert run(watch_of(0.8, examine=fails), 0.6, 1000) is None
    assert "draft head could not be examined: no room" in lines(caplog)


def test_a_hybrid_leaves_it_out_and_tries_it_again() -> None:
    watch = watch_of(0.8)
    target = TargetCosts((1,), (CostCurve((1, 16), (1.0, 1.5)),))
    cost = CostModel(target)
    for name in ("head", "other", "third"):
        passes = CostCurve((1,), (0.01,))
        cost.add(name, DrafterCosts((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), passes, prior=(0.9,)))
    cost.learn_plain(1, 1.0)  # so that no plain step is wanted
    members = {"auto": ("head", "other", "third"), "head": ("head",)}
    controller = AdaptiveController(cost, members, watch=watch)

    def drafter(name: str) -> Any:
        seq = sequence(5, drafter=name)
        return [controller.lengths([seq])[0] for _ in range(30)][-1]

    assert drafter("auto").drafter == "head"  # the first of equals
    watch.collapsed[KEY] = watch.tokens + 100
    assert drafter("auto").drafter == "other"
    assert drafter("head").drafter == "head"  # asked for by its name
    watch.tokens += 100
    assert drafter("auto").drafter == "head"


def test_a_head_that_is_rather_surely_sound_is_examined_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Healthy by what its card states. Each further examination would cost a target forward."""
    monkeypatch.setattr(Origin, "stated", 0.63)

    def is_sound(right: int, positions: int) -> bool:
        outcomes = [1.0] * right + [0.0] * (positions - right)
        return Origin(None, None, None, {0: outcomes})._is_healthy()  # type: ignore[arg-type]

    assert is_sound(13, 48)
    assert not is_sound(2, 7)  # the same share, but that may be chance
    assert not is_sound(8, 48)
