"""Requests get the drafter they name; each drafter sees its own requests only, and all commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, DrafterCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import NoDrafter
from paceline.draft.hybrid import Router
from paceline.errors import ConfigError
from paceline.llm import LLM
from support.engine_models import write_pair
from support.simulated_time import Guesser, always, costs


class Watched(Guesser):
    """Records its calls."""

    def __init__(self, name: str, features: tuple[int, ...]) -> None:
        super().__init__(name, always(1.0))
        self.features = features
        self.text = list(range(1, 99))
        self.asked: list[int] = []
        self.seen: list[int] = []

    def propose(self, plan):  # type: ignore[no-untyped-def]
        self.asked += [item.seq.seq_id for item in plan.slices]
        return super().propose(plan)

    def observe(self, commits, out):  # type: ignore[no-untyped-def]
        self.seen += [commit.seq_id for commit in commits]

    def forget(self, seq_id: int) -> None:
        self.seen.remove(seq_id)


def request(seq_id: int, drafter: str | None) -> SequenceState:
    return SequenceState(seq_id, [1, 2, 3], 3, SamplingParams(drafter=drafter), cached=2)


def test_each_request_is_drafted_for_by_the_one_it_names() -> None:
    first, second = Watched("first", (3,)), Watched("second", (1, 3))
    router = Router({"first": first, "second": second}, "cpu")
    names = ["second", None, "none", "first", "second"]
    slices = tuple(Slice(request(i, name), 1, i + 1) for i, name in enumerate(names))
    trees = router.propose(Plan(slices))
    assert [tree.tokens.tolist() for tree in trees] == [
        [4],
        [4, 5],
        [],
        [4, 5, 6, 7],
        [4, 5, 6, 7, 8],
    ]
    assert (first.asked, second.asked) == ([1, 3], [0, 4])
    assert router.features == (1, 3)
    router.observe([Commit(i, (4,)) for i in range(5)], ModelOutput(None))  # type: ignore[arg-type]
    assert first.seen == second.seen == [0, 1, 2, 3, 4]
    router.forget(2)
    assert first.seen == second.seen == [0, 1, 3, 4]


def test_lengths_are_learnt_for_each_sequence_and_drafter() -> None:
    """Acceptance rates are learnt per drafter."""
    lengths = tuple(range(9))
    own = DrafterCosts(lengths, lengths, CostCurve((1,), (0.1,)))
    control = AdaptiveController(CostModel(costs(), {"good": own, "bad": own}))
    seqs = [request(0, "good"), request(1, "bad"), request(2, None), request(3, "none")]
    chosen: dict[int, list[int]] = {seq.seq_id: [] for seq in seqs}
    for _ in range(100):
        for seq in seqs:  # each alone: together none may slow down another
            length = control.lengths([seq])[0].length
            chosen[seq.seq_id].append(length)
            kept = 0 if seq.params.drafter == "bad" else length
            path = tuple(range(kept))
            reached = min(kept + 1, length)
            tokens = (1,) * (kept + 1)
            commit = Commit(seq.seq_id, tokens, path, length, reached, scheduled=1)
            control.observe([commit], 1.05 + 0.11 * length, 0.1 * length)
    good, bad, default, none = (sum(chosen[seq.seq_id][-40:]) / 40 for seq in seqs)
    assert good > 4 and default > 4
    assert bad < 1 and none == 0, "but for probes"
    # A new request starts from what its drafter has shown.
    assert control.lengths([request(8, "good")])[0].length > 4
    assert control.lengths([request(9, "bad")])[0].length <= 4, "at most a probe"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("router")))


def test_names_of_loaded_drafters(pair: tuple[str, str]) -> None:
    target, draft = pair
    llm = LLM(target, ["ngram:min=2", draft, f"model:{target}"], dtype="float32", draft_length=2)
    assert llm.drafters == ("ngram", "model", "model-2")
    wrong = "drafter: 'eagle3' is not loaded; use one of ngram, model, model-2, none"
    with pytest.raises(ConfigError, match=wrong):
        llm.generate("Once upon", SamplingParams(drafter="eagle3"))
    (own,) = llm.generate("Once upon", SamplingParams(drafter="model-2", max_tokens=9))
    assert own.stats.acceptance_rate == 1.0
    llm.close()


def test_two_drafters_of_one_name_with_a_hyphen_are_both_kept() -> None:
    """The second replaced the first."""
    made = []
    for _ in range(2):
        made.append(NoDrafter())
        made[-1].name = "my-own"
    llm = LLM("paceline/tiny", made, draft_length=2)
    assert llm.drafters == ("my-own", "my-own-2")
    assert [*llm.engine.drafter.members] == made  # type: ignore[attr-defined]
    llm.close()


def test_a_single_drafter_may_be_left_out(pair: tuple[str, str]) -> None:
    target, _ = pair
    llm = LLM(target, f"model:{target}", dtype="float32", draft_length=2)
    plain, named = llm.generate(
        ["Once upon", "Once upon"],
        [SamplingParams(drafter=name, max_tokens=9) for name in ("none", "model")],
    )
    assert plain.token_ids == named.token_ids
    assert plain.stats.drafted_tokens == 0 < named.stats.drafted_tokens
    with pytest.raises(ConfigError, match="use one of model, none, or load it"):
        llm.generate("Once upon", SamplingParams(drafter="ngram"))
    llm.close()


def test_a_drafter_is_named_by_text() -> None:
    with pytest.raises(ConfigError, match="drafter is 3; give the name of a loaded one"):
        SamplingParams(drafter=3)  # type: ignore[arg-type]
