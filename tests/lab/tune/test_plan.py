"""Candidates, samples, rounds and winners; and the whole on a tiny random pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, ConfigError, DataError, PacelineError, SamplingParams
from paceline.drafters import parse_draft
from paceline.engine.driver import StepSums
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.prompts import BenchPrompt
from paceline.lab.bench.runner import BenchJob, Heat, Method
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.measure import PLAIN as NO_DRAFT
from paceline.lab.tune.measure import (
    Confirmation,
    Finalist,
    Run,
    affordable,
    confirm,
    decode,
    rounds_of,
    unrest_between,
    winner,
)
from paceline.lab.tune.plan import TuningOutcome, choose, tune, unrest_of
from paceline.lab.tune.present import _predicted, decision, report_of, tuned_settings, tuning_record
from paceline.lab.tune.search import (
    DrafterCandidate,
    at_hand,
    default_candidate,
    hybrid_of,
    variants,
)
from paceline.model.names import REAL
from paceline.settings.tuned import TunedSettings
from support.engine_models import write_pair
from support.made_outcomes import outcome as timed
from support.tuning_methods import PLAIN, chain, levels_of, step, target

GREEDY = SamplingParams(max_tokens=16)
SLOW = ((1, step(9.0, nodes=1)),)


# -- candidates ------------------------------------------------------------------------------


def test_the_embedded_pair_has_its_own_candidates() -> None:
    proposed = at_hand("paceline/tiny", [])
    specs = [candidate.spec for candidate in proposed]
    assert len(specs) == len(set(specs)) >= 12
    assert "model:paceline/tiny-draft,nodes=0" in specs
    assert "eagle3:paceline/tiny-eagle3,branching=2x2x1x1x1" in specs
    assert {"medusa:paceline/tiny-medusa", "ngram", "suffix", "recycling"} <= set(specs)
    assert not any(candidate.requested for candidate in proposed)
    assert [candidate.spec for candidate in proposed if candidate.default] == ["auto"]
    families = list(dict.fromkeys(candidate.family for candidate in proposed))
    assert families[:3] == ["ngram", "suffix", "recycling"]  # those that run a model are dearer


def test_what_a_drafter_is_of_is_named() -> None:
    """The 4- and 8-bit forms of the target were called "int4" and "int4 int8"."""
    labels = [
        candidate.label for text in ("quantized", "some/draft") for candidate in variants(text)
    ]
    assert labels[:2] == ["quantized:int4", "quantized:int8"]
    assert labels[2] == "draft chain" and labels[-2:] == ["draft int8", "draft int4"]


def test_the_default_draft_is_always_a_candidate() -> None:
    """A minute went to the dearest drafter, and what commands take was never entered."""
    for drafts in ([], ["some/draft"]):
        (default,) = [c for c in at_hand("any/target", drafts) if c.default]
        assert (default.spec, default.label) == ("auto", "auto (default)")
    assert not any(c.default for c in at_hand(REAL, ["some/draft"], only=True))
    composed = default_candidate("hybrid:suffix+ngram+eagle3:paceline/smollm2-eagle3")
    assert composed.label == "suffix + ngram + smollm2-eagle3 (default)" and composed.default


def entry(finalist: Finalist, ratios: Sequence[float], drafted: int = 9) -> Confirmation:
    return Confirmation(finalist, timed(1.0, drafted=drafted), tuple(ratios))


def of_spec(spec: str, length: int | str) -> Finalist:
    return Finalist(spec, spec, length, 8)  # type: ignore[arg-type]


def confirm_by_hand(outcome: TuningOutcome, ratios: Sequence[float]) -> None:
    """One round in which the finalists had these speeds by plain decoding's."""
    runs = {
        finalist.key: timed(1 / ratio, drafted=9)
        for finalist, ratio in zip(outcome.finalists, ratios, strict=True)
    }
    outcome.heats.append(Heat(BenchJob("", 1, 0.0, 0, ()), 0, runs))


def test_another_draft_must_beat_the_default_clearly() -> None:
    """Two rounds of noise, and settings recommended less than what commands take unasked."""
    usual = Finalist("usual", "hybrid:ngram+suffix", "auto", 8, default=True)
    other = Finalist("other", "suffix", 4, 8)
    for ratio, wins in ((1.22, "usual"), (1.3, "other")):
        results = [
            entry(of_spec(NO_DRAFT, 0), [1.0], 0),
            entry(other, [ratio]),
            entry(usual, [1.2]),
        ]
        assert winner(results).finalist.label == wins


def test_other_targets_have_what_is_given_and_what_needs_no_training() -> None:
    proposed = at_hand("other", ["some/draft", "ngram:min=2"])
    assert [c.spec for c in proposed if c.requested] == [
        "model:some/draft,nodes=0",
        "model:some/draft,branching=2x2x1x1x1",
        "model:some/draft,nodes=16",
        "ngram:min=2",
    ]
    free = [c.spec for c in proposed if not c.requested and not c.default]
    assert free == [
        "ngram",
        "suffix",
        "recycling",
        "model:some/draft,nodes=0,quantize=int8",
        "model:some/draft,nodes=0,quantize=int4",
        "lookahead",
        "layer_skip",
        "quantized:int4",
        "quantized:int8",
    ]
    assert [c.spec for c in at_hand("other", ["suffix"], only=True)] == ["suffix"]
    for none in ([], ["none"]):
        with pytest.raises(ConfigError, match="names no drafter"):
            at_hand("other", none, only=True)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("some/draft", ["chain", "2x2 tree", "16 nodes", "", ""]),
        ("model:some/draft,vocab=auto", ["chain", "2x2 tree", "16 nodes", "", ""]),
        ("model:some/draft,quantize=int8", ["chain", "2x2 tree", "16 nodes"]),
        ("quantized", ["chain", ""]),
        ("quantized:int8", ["chain"]),
        ("tree:some/draft", ["tree"]),
        ("model:some/draft,branching=3x1", ["3x1"]),
        ("eagle3:head,nodes=32", ["32 nodes"]),
        ("eagle3:head,nodes=0", ["chain"]),
        ("eagle2:head", ["tree"]),
        ("none", []),
    ],
)
def test_variants_of_a_draft(text: str, shapes: list[str]) -> None:
    spec = parse_draft(text)
    assert [*spec.variants(), *("" for _ in spec.precisions())] == shapes
    assert len(variants(text)) == len(shapes)


def test_a_hybrid_names_its_members() -> None:
    hybrid = hybrid_of(chain(0.5, 0.0, label="ngram"), chain(0.8, 0.1, label="model:a/b"))
    assert hybrid.spec == "hybrid:ngram+model:a/b"


# -- samples and rounds ----------------------------------------------------------------------


def test_rounds_share_no_prompt_while_there_are_enough() -> None:
    prompts = [[n] for n in range(20)]
    jobs, turns = rounds_of(prompts, 2, 8, 1, GREEDY)
    assert ([len(job.asks) for job in jobs], turns) == ([8, 8], 1)
    assert len({ask.prompt for job in jobs for ask in job.asks}) == 16
    for many, count, concurrency, sizes, turns in (
        (20, 3, 1, [8, 8], 2),
        (3, 2, 1, [3], 2),
        (3, 1, 5, [5], 1),
    ):
        jobs, repeats = rounds_of(prompts[:many], count, 8, concurrency, GREEDY)
        assert ([len(job.asks) for job in jobs], repeats) == (sizes, turns)


def test_the_winner() -> None:
    plain = entry(of_spec(NO_DRAFT, 0), [1.0], 0)
    fast = entry(of_spec("a", 4), [1.5, 1.52, 9.0])
    adaptive = entry(of_spec("a", "auto"), [1.49])
    assert winner([plain, fast, adaptive]) is adaptive
    assert winner([plain, fast, entry(of_spec("a", "auto"), [1.4])]) is fast
    assert winner([plain, fast, entry(of_spec("b", "auto"), [1.5])]) is fast
    assert winner([plain, entry(of_spec("a", 4), [1.01])]) is plain
    assert winner([plain, entry(of_spec("a", "auto"), [1.5], drafted=0)]) is plain
    assert winner([plain]) is plain


def test_what_rounds_disagree_on_is_not_chosen() -> None:
    """Two rounds, 0.05x and 4x, chose a draft; the mean of both was 2x."""
    plain, default = entry(of_spec(NO_DRAFT, 0), [1.0, 1.0], 0), of_spec("usual", "auto")
    wild = entry(of_spec("a", 4), [0.05, 4.0])
    usual = entry(replace(default, default=True), [1.2, 1.3])
    assert winner([plain, wild]) is plain
    assert winner([plain, wild, usual]) is usual
    assert winner([plain, entry(of_spec("a", 4), [1.1, 4.0]), usual]) is usual  # once slower
    steady = entry(of_spec("a", 4), [1.5, 1.6])
    assert winner([plain, steady, usual]) is steady


@pytest.mark.parametrize(
    ("rates", "rounds"),
    [
        ([2.0, 2.1], 2),  # both say the same
        ([0.1, 4.0, 2.0, 2.0], 4),  # no more than as many again
        ([2.0, 5.0, 2.0, 2.0], 4),  # faster, but by how much?
        ([0.9, 0.8], 2),
        ([0.05, 1.9, 0.9, 0.9], 4),  # slower, or faster?
    ],
)
def test_rounds_that_disagree_are_followed_by_more(rates: list[float], rounds: int) -> None:
    finalists, record = [Finalist("plain", NO_DRAFT, 0, 8), of_spec("ngram", 4)], list[Heat]()

    class Engine:
        def __init__(self, name: str) -> None:
            self.name, self.rounds = name, 0

        def refresh(self) -> None: ...
        def close(self) -> None: ...

        def run(self, asks: Sequence[object]) -> object:
            self.rounds += 1
            drafts = self.name != "plain"
            return timed(
                1 / rates[self.rounds - 2] if drafts and self.rounds > 1 else 1.0, drafted=9
            )

    class Engines(Starter):
        def __init__(self) -> None: ...

        def open(self, method: Method, *_: object, **__: object) -> Any:
            return Engine(method.name)

    jobs, _ = rounds_of([[1]], 1, 1, 1, SamplingParams(max_tokens=4))
    confirm(Engines(), finalists, jobs, 2, record, lambda what: None, Budget())
    assert len(record) == rounds


def test_unrest() -> None:
    def run(seconds: Sequence[float]) -> Run:
        return Run(1, [step(target=s) for s in seconds], StepSums(), [])

    assert unrest_of(run([1.0] * 20)) == 1.0
    assert unrest_of(run([1.0] * 10 + [4.0] * 10)) == 4.0
    assert unrest_of(run([])) == 1.0


def test_a_round_in_which_the_machine_stood_still() -> None:
    """The table had 2 tokens a second against 10, and the choice 1.97x: one was of all rounds
    together, the other their median. Nor was it said that the machine had been busy."""
    outcome = synthetic()
    outcome.finalists = choose(outcome)[:2]
    for ratios in ((1.0, 1.05), (0.5, 2.0)):
        confirm_by_hand(outcome, ratios)
    outcome.rounds = 2
    plain, drafting = outcome.results
    assert (plain.rate, drafting.rate) == (3.0, 6.1)  # of 4 and 2, of 4.2 and 8 tokens a second
    assert drafting.speedup == pytest.approx((1.05 + 4.0) / 2)
    assert "look, length 8: 6 tokens/s against 3, 2.5" in decision(outcome)
    heats = [
        Heat(BenchJob("", 1, 0.0, 0, ()), turn, {"plain": timed(1.0, decoding=steps)})
        for turn, steps in enumerate(StepSums(2, 2, 2, seconds={"target": s}) for s in (1.0, 4.0))
    ]
    assert unrest_between(heats) == 4.0
    assert unrest_between(list[Heat]()) == 1.0


def synthetic() -> TuningOutcome:
    a = chain(0.8, 0.1, label="a")
    fast = chain(0.7, 0.0, label="look")
    fast = replace(fast, costs=replace(fast.costs, passes=(0,) * 9))
    methods = [a, replace(a, label="a tree"), fast, chain(0.2, 0.9, label="bad")]
    options = TuneOptions(4, rounds=1)
    return TuningOutcome(options, "m", 9, target=target(1000), plain=PLAIN, methods=methods)


def test_finalists_are_the_best_of_two_families_and_a_hybrid() -> None:
    chosen = choose(synthetic())
    assert chosen[0].spec == NO_DRAFT
    assert [(c.spec, c.length) for c in chosen[1:]] == [
        ("look", 8),
        ("look", "auto"),
        ("a", chosen[3].length),
        ("a", "auto"),
        ("hybrid:look+a", "auto"),
    ]
    assert all(c.predicted and c.predicted > 1 for c in chosen[1:])


def test_the_default_draft_is_confirmed_also_where_time_is_short() -> None:
    usual = DrafterCandidate("usual", "hybrid:ngram+suffix", "hybrid", default=True)
    outcome = synthetic()
    chosen = choose(outcome, usual)
    assert [c.label for c in chosen[:3]] == ["plain", "usual", "look"]
    assert (chosen[1].length, chosen[1].predicted, chosen[1].methods) == ("auto", None, ())
    assert outcome.target is not None
    few, _ = affordable(chosen, outcome.target, TuneOptions(), Budget(0.0))
    assert [c.label for c in few] == ["plain", "usual", "look", "look"]
    outcome.finalists = chosen
    confirm_by_hand(outcome, [1.0, *[1.2] * (len(chosen) - 1)])
    assert tuning_record(outcome)["confirmation"][1]["predicted_by_measured"] is None
    assert report_of(outcome).sections


def test_lookups_that_gain_are_confirmed_before_what_runs_a_model() -> None:
    outcome = synthetic()
    outcome.methods = [chain(0.95, 0.01, label="a"), *outcome.methods[2:]]
    assert outcome.settings[0].method.label == "a"
    assert [c.label for c in choose(outcome)][:4] == ["plain", "look", "look", "a"]
    outcome.methods[1] = replace(outcome.methods[1], levels=levels_of([1e-9] * 8), steps=SLOW)
    assert choose(outcome)[1].label == "a"


def test_what_was_confirmed_beats_what_was_predicted() -> None:
    """It confirmed 0.70x and 0.92x, and then named a draft "predicted to reach 1.43x"."""
    outcome = synthetic()
    finalists = choose(outcome)
    outcome.finalists = [finalists[0], *finalists[2:4]]
    confirm_by_hand(outcome, (1.0, 0.7, 0.92))
    shown = f"(a, length {finalists[3].length} 0.92x, look, length auto 0.70x)"
    outcome.options = replace(outcome.options, rounds=3)
    assert decision(outcome) == (
        "Not confirmed: after 1 of 3 rounds no draft is advised, all were slower than plain "
        f"decoding {shown}. Give more --seconds."
    )
    outcome.options = replace(outcome.options, rounds=1)
    assert decision(outcome) == f"Plain decoding: all drafts were slower {shown}."
    outcome.options, outcome.heats = replace(outcome.options, rounds=3), list[Heat]()
    confirm_by_hand(outcome, (1.0, 1.3, 0.92))
    assert "rounds by plain decoding: look, length auto 1.30x, a, length" in decision(outcome)


def test_wrong_predictions_do_not_stand_beside_what_was_measured() -> None:
    for measured, shown in ((1.5, "1.60x"), (0.8, "")):
        finalist = replace(of_spec("a", 4), predicted=1.6)
        result = Confirmation(finalist, timed(1.0, drafted=9), (measured,), (measured,))
        assert _predicted(result) == shown
    assert _predicted(entry(of_spec("a", 4), [1.5])) == ""  # no step without prompts


def test_an_interrupted_outcome_says_what_it_has() -> None:
    outcome = synthetic()
    outcome.finalists.append(of_spec(NO_DRAFT, 0))
    assert decision(outcome).startswith("Not confirmed: look at length 8")
    assert tuning_record(outcome)["confirmed"] is False
    titles = [section.title for section in report_of(outcome).sections]
    assert titles == ["Search", "Choice"]
    empty = TuningOutcome(TuneOptions(), "m", 9)
    assert decision(empty) == "Nothing was measured to the end."
    assert tuning_record(empty)["search"] == []
    assert [section.title for section in report_of(empty).sections] == ["Choice"]


# -- the whole -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("tune")), noise=0.02)


@pytest.fixture(scope="module")
def llm(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], dtype="float32", max_batch_size=2, draft_length=3, draft=folders[1])


def test_decoding_counts_what_completions_count(llm: LLM) -> None:
    texts = ["Once upon a time there", "def add(a, b):", "The quick brown fox"]
    ids = [[int(t) for t in llm.tokenizer(text)["input_ids"]] for text in texts]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    run = decode(llm, ids, 2, params, longest=3)
    completions = llm.generate(ids, params)
    assert run.outputs == [completion.token_ids for completion in completions]
    assert {step.sequences for step in run.steps} == {1, 2}
    levels = run.levels
    assert 0 < levels.sequences <= sum(c.stats.target_steps for c in completions)
    # All have room for the longest draft.
    assert levels.drafted == 3 * levels.sequences
    assert levels.accepted_at[0] >= levels.accepted_at[1] >= levels.accepted_at[2]
    assert levels.reached[0] == levels.sequences
    assert levels.reached[1] == levels.accepted_at[0]
    assert not llm.engine.has_work


def words(count: int) -> list[BenchPrompt]:
    texts = ["Once upon a time", "def add(a, b):", "What is 12 + 30?", "A small model"]
    return [BenchPrompt(f"p{n}", f"c{n % 2}", texts[n % 4] + "!" * n, False) for n in range(count)]


def test_tuning_a_random_pair(folders: tuple[str, str], tmp_path: Path) -> None:
    llm = LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)
    candidates = [
        *at_hand("other", [f"model:{folders[1]},nodes=0"], only=True),
        DrafterCandidate("gone", "model:nowhere/at/all", "model"),
    ]
    outcome = TuningOutcome.start(TuneOptions(concurrency=2, max_tokens=12, rounds=1), llm)
    said: list[str] = []
    tune(llm, candidates, words(4), outcome, said.append)
    assert outcome.chosen is not None
    assert [method.family for method in outcome.methods] == ["model"]
    assert [what for what, _ in outcome.left_out] == ["gone"]
    (method,) = outcome.methods
    assert method.levels.rates[0] > 0.3  # the draft is the target with a little noise
    assert len(outcome.results) == 3
    assert all(result.ratios for result in outcome.results)
    assert said[:2] == ["loading drafters", "measuring the target"]
    settings = tuned_settings(outcome, llm)
    settings.write(tmp_path / "p.toml")
    assert TunedSettings.read(tmp_path / "p.toml").draft == settings.draft
    again = LLM(folders[0], draft="none", dtype="float32", config=tmp_path / "p.toml")
    assert again.notes == ()
    assert again.generate("Once upon a time", GREEDY)[0].token_ids == (
        llm.generate("Once upon a time", GREEDY)[0].token_ids
    )


def test_what_cannot_be_tuned(folders: tuple[str, str]) -> None:
    llm = LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)
    with pytest.raises(DataError, match="no prompt leaves room for 500 tokens in the 160"):
        tune(
            llm,
            [],
            words(2),
            TuningOutcome.start(TuneOptions(max_tokens=500), llm),
            lambda what: None,
        )
    given = variants("nowhere/at/all", requested=True)
    with pytest.raises(PacelineError, match="nowhere/at/all"):
        tune(
            llm,
            given,
            words(2),
            TuningOutcome.start(TuneOptions(max_tokens=4), llm),
            lambda what: None,
        )
    with pytest.raises(ConfigError, match="has no option colour"):
        options = DrafterCandidate("n", "ngram:colour=1", "ngram", requested=True)
        asked = TuneOptions(max_tokens=4)
        tune(llm, [options], words(2), TuningOutcome.start(asked, llm), lambda what: None)
