"""Training block drafters on a tiny target: learning, resuming, and what the engine measures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.train.acceptance import total
from paceline.train.block import BlockTrainer
from paceline.train.configs import DFlashTrainConfig, DSparkTrainConfig
from paceline.train.trainer import Progress
from paceline.train.unrolled import DraftAttention, DraftStarts
from support import training_runs

pytestmark = pytest.mark.slow  # two kinds learn; those of EAGLE share the unrolled forward

train = partial(training_runs.train, BlockTrainer, eval_every=30)
KINDS = {"dflash": DFlashTrainConfig, "dspark": DSparkTrainConfig}


@pytest.fixture(scope="module")
def target(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return training_runs.talking_target(corpus, tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module", params=KINDS)
def config(request: pytest.FixtureRequest, corpus: str, target: str) -> DFlashTrainConfig:
    sizes = {"block_size": 5, "stride": 1, "feature_layers": (1, 2, 4)}
    more = {"markov_rank": 8} if request.param == "dspark" else {}
    files = {"model": target, "data": (corpus,), "valid": (corpus,)}
    run = training_runs.HEAD_RUN | {"lr": 0.02, "adam_lr": 0.02}
    return KINDS[request.param](**files, **sizes, **more, **run)


def test_it_learns_and_drafts_in_the_engine(config: DFlashTrainConfig, tmp_path: Path) -> None:
    seen: list[Progress] = []
    trainer = train(config, tmp_path, seen.append)
    assert seen[-1].loss < 0.75 * seen[0].loss
    assert total(seen[-1].acceptance.values()).mean_accepted_length > 1.25
    llm = LLM(config.model, draft="none", dtype="float32")
    spec = f"{config.kind}:{tmp_path / 'head'}"
    drafting = llm.with_draft(spec, draft_length=4)
    params = SamplingParams(max_tokens=30)
    (plain,), (drafted,) = (one.generate(["Today Lily"], params) for one in (llm, drafting))
    assert drafted.token_ids == plain.token_ids and drafted.stats.accepted_tokens > 1
    assert trainer.spec == f"{config.kind}:"


def test_a_resumed_run_ends_with_the_same_weights(
    config: DFlashTrainConfig, tmp_path: Path
) -> None:
    short = replace(config, steps=8, held_out=2)
    whole = train(short, tmp_path / "whole")
    again = training_runs.resumed(
        lambda: BlockTrainer(short, tmp_path / "cut", device="cpu"), 5, eval_every=30
    )
    assert training_runs.same_weights(whole.head, again.head)


def test_windows_of_a_batch_do_not_see_each_other(
    config: DFlashTrainConfig, tmp_path: Path
) -> None:
    trainer = BlockTrainer(replace(config, steps=1), tmp_path, device="cpu")
    stream = torch.from_numpy(trainer.documents.streams[0].ids.astype("int64"))
    windows = stream[:120].view(3, 40)
    with torch.no_grad():
        whole = float(trainer.loss_of(trainer.run_target(windows)))  # as many starts in each
        alone = [float(trainer.loss_of(trainer.run_target(row[None]))) for row in windows]
    assert whole == pytest.approx(sum(alone) / 3, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sees_the_text_before_it_and_itself(causal: bool) -> None:
    """Values that name their row, keys that are all alike: the output counts what is seen."""
    starts = DraftStarts.of(torch.ones(1, 6, dtype=torch.bool))  # from 4 starts
    names = torch.eye(14)[None, None]
    context = [(torch.zeros(1, 1, 6, 14), names[:, :, :6])]
    zero = torch.zeros(1, 1, 8, 14)  # 4 blocks of 2 rows
    attend = DraftAttention(starts, None, context, 2, causal)
    out = attend(zero, zero, names[:, :, 6:], layer=0, scaling=1.0)
    seen = [sorted(row.nonzero().flatten().tolist()) for row in out[0, :, 0]]
    assert seen[1] == [0, 6, 7] and seen[5] == [0, 1, 2, 10, 11]
    assert seen[0] == [0, 6, 7][: 2 if causal else 3]
    assert seen[4] == [0, 1, 2, 10, 11][: 4 if causal else 5]
