"""Training Medusa heads on a tiny target: learning, resuming, and what the engine measures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline import LLM, ConfigError
from paceline.draft.heads.medusa_head import load_medusa
from paceline.draft.spec import TargetShape
from paceline.draft.trees.shape import best_shape
from paceline.train.acceptance import total
from paceline.train.medusa import MedusaTrainConfig, MedusaTrainer, accuracy_of
from paceline.train.unrolled import DraftStarts
from support import training_runs

train = partial(training_runs.train, MedusaTrainer, eval_every=30)


@pytest.fixture(scope="module")
def config(corpus: str, talking: str) -> MedusaTrainConfig:
    return MedusaTrainConfig(
        model=talking,
        data=(corpus,),
        valid=(corpus,),
        **training_runs.HEAD_RUN
        | {"medusa_heads": 3, "medusa_layers": 1, "shared_head": True, "lr": 0.03, "adam_lr": 0.03},
    )


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


# -- what the heads are taught ---------------------------------------------------------------


def test_head_k_learns_the_distribution_k_plus_two_tokens_ahead(
    config: MedusaTrainConfig, tmp_path: Path
):
    """The loss is lowest where head k says what the target says k + 1 rows later."""
    trainer = MedusaTrainer(replace(config, argmax_weight=0.0, step_decay=0.5), tmp_path, "cpu")
    stream = trainer.documents.streams[0].ids[:84].astype("int64")
    seen = trainer.run_target(torch.from_numpy(stream).view(2, 42))
    logits = trainer.target(input_ids=seen.ids).logits.detach()
    places = DraftStarts.of(seen.loss_mask)
    assert len(places.flat) == 2 * 40
    asked = []

    def perfect(k, features, lm_head):
        asked.append((k, features.shape[0]))
        return logits.flatten(0, 1)[places.index_ahead(1 + k)]

    trainer.head.logits = perfect  # type: ignore[method-assign]
    best = float(trainer.loss_of(seen))
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    parts = [entropies[:, 1 + k : 41].sum() / 80 for k in range(3)]
    wanted = sum(0.5**k * float(part) for k, part in enumerate(parts)) / 1.75
    assert best == pytest.approx(wanted, rel=1e-4)
    assert asked == [(k, 80) for k in range(3)]


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])  # it learns
def test_the_heads_learn(
    config: MedusaTrainConfig, learnt: training_runs.Learnt, tmp_path: Path, shared: bool
) -> None:
    if not shared:
        own = replace(config, shared_head=False)
        learnt = training_runs.learnt(MedusaTrainer, own, tmp_path / "own", eval_every=30)
    seen = learnt.seen
    assert seen[-1].loss < 0.7 * seen[0].loss
    after = total(seen[-1].acceptance.values()).mean_accepted_length
    assert after > 1.25 and after > learnt.before.mean_accepted_length
    untouched = MedusaTrainer(config, tmp_path / "new", device="cpu").target
    assert same(untouched.state_dict(), learnt.trainer.target.state_dict())


def test_a_resumed_run_ends_with_the_same_weights(
    config: MedusaTrainConfig, tmp_path: Path
) -> None:
    short = replace(config, steps=8, held_out=2)

    whole = train(short, tmp_path / "whole")
    again = training_runs.resumed(
        lambda: MedusaTrainer(short, tmp_path / "cut", device="cpu"), 5, eval_every=30
    )
    assert training_runs.same_weights(whole.head, again.head)
    assert training_runs.same_weights(whole.target, again.target)
    assert again.history == whole.history


# -- what comes out --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 2])
def test_held_out_acceptance_is_what_the_engine_measures(
    finished: MedusaTrainer, talking: str, length: int
) -> None:
    finished.config = replace(finished.config, draft_length=length)
    spec = f"medusa:{finished.out / 'head'},tree=chain"
    llm = LLM(talking, spec, dtype="float32", device="cpu", draft_length=length)
    # Or the comparison would say little.
    assert training_runs.check_held_out(finished, llm).mean_accepted_length > 1.25


def test_the_accuracy_is_written_for_the_tree(finished: MedusaTrainer) -> None:
    heads = load_medusa(str(finished.out / "head"), TargetShape(32, 320, 3))
    accuracy = heads.config.accuracy
    assert len(accuracy) == 3 and all(len(ranks) == 10 for ranks in accuracy)
    assert accuracy[0][0] > 0.1
    assert all(0 <= value <= 1 for ranks in accuracy for value in ranks)
    assert best_shape(accuracy, 8) == best_shape(finished.head.config.accuracy, 8)


# -- the measurement -------------------------------------------------------------------------


def test_accuracy_is_conditional_on_the_previous_heads() -> None:
    ranks = torch.tensor([[0, 1], [0, 3], [1, 0], [3, 0], [0, -1]])  # 3: not a candidate
    first, second = accuracy_of(ranks, 3)
    assert first == pytest.approx((3 / 5, 1 / 5, 0))
    assert second == pytest.approx((1 / 3, 1 / 3, 0))  # of rows 0, 1 and 2


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_heads": 0}, "heads is 0"),
        ({"medusa_layers": 0}, "leaves no weights"),
    ],
)
def test_invalid_options_leave_no_files(
    config: MedusaTrainConfig, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MedusaTrainer(replace(config, **changes), tmp_path / "run", device="cpu")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
