"""Training EAGLE heads on a tiny target: unrolling, resuming, and what the engine measures."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline import LLM, ConfigError, DataError, ModelLoadError, SamplingParams
from paceline.model.names import model_path
from paceline.train.acceptance import total
from paceline.train.eagle import EagleTrainConfig, EagleTrainer
from paceline.train.reading import TargetOutputs
from paceline.train.trainer import Progress
from paceline.train.unrolled import DraftAttention, DraftStarts
from support import training_runs

train = partial(training_runs.train, EagleTrainer, eval_every=30)


@pytest.fixture(scope="module")
def config(corpus: str, talking: str) -> EagleTrainConfig:
    return EagleTrainConfig(
        model=talking,
        data=(corpus,),
        valid=(corpus,),
        draft_vocab_size=150,
        feature_layers=(1, 2, 3),
        ttt_steps=3,
        **training_runs.HEAD_RUN | {"lr": 0.02, "adam_lr": 0.02},
    )


# -- the unrolled forward --------------------------------------------------------------------


def chain_by_hand(trainer: EagleTrainer, seen: TargetOutputs, t: int) -> list[int]:
    """Greedy drafts from position t, computed row by row."""
    chain = chain_logits(trainer, seen, t)
    return [int(trainer.head.to_target_ids(logits.argmax(-1))) for logits in chain]


def test_drafts_of_all_positions_at_once_equal_drafting_from_each(finished: EagleTrainer) -> None:
    stream = finished.documents.streams[0].ids
    ids = torch.from_numpy(stream[:20].astype("int64"))[None]
    with torch.inference_mode():
        seen = finished.run_target(ids)
        drafts = finished.drafts(seen, 3)
        for t in (0, 5, 16):
            expected = chain_by_hand(finished, seen, t)
            assert drafts[t, : len(expected)].tolist() == expected


def test_windows_of_a_batch_do_not_see_each_other(finished: EagleTrainer) -> None:
    stream = torch.from_numpy(finished.documents.streams[0].ids.astype("int64"))
    windows = stream[:120].view(3, 40)
    with torch.no_grad():
        whole = float(finished.loss_of(finished.run_target(windows)))  # as many starts in each
        alone = [float(finished.loss_of(finished.run_target(row[None]))) for row in windows]
    assert whole == pytest.approx(sum(alone) / 3, rel=1e-4)


def test_later_steps_see_what_came_before_and_their_own_chain() -> None:
    """Values that name their row, keys that are all alike: the output counts what is seen."""
    starts = DraftStarts.of(torch.ones(1, 6, dtype=torch.bool))  # from 4 starts

    def seen_in(attend: DraftAttention, rows: tuple[int, ...]) -> list[list[int]]:
        start = 0
        for count in rows:
            names = torch.eye(16)[start : start + count][None, None]
            keys, queries = torch.zeros(1, 1, count, 16), torch.zeros(1, 1, min(count, 4), 16)
            out = attend(queries, keys, names, layer=0, scaling=1.0)[0, :, 0]
            start += count
        torch.testing.assert_close(out[-1].max(), torch.tensor(1 / int((out[-1] > 0).sum())))
        return [sorted(row.nonzero().flatten().tolist()) for row in out]

    assert seen_in(DraftAttention(starts), (6,)) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    own = [[0, 6, 10], [0, 1, 7, 11], [0, 1, 2, 8, 12], [0, 1, 2, 3, 9, 13]]
    assert seen_in(DraftAttention(starts), (6, 4, 4)) == own
    fewer, kept = starts.strided(3, 0)
    assert kept.tolist() == [0, 3]
    attend, names, zero = DraftAttention(starts, fewer), torch.eye(16), torch.zeros(1, 1, 6, 16)
    attend(zero[:, :, :4], zero, names[None, None, :6], layer=0, scaling=1.0)
    two = zero[:, :, :2]
    out = attend(two, two, names[None, None, 6:8], layer=0, scaling=1.0)[0, :, 0]
    assert [row.nonzero().flatten().tolist() for row in out] == [[0, 6], [0, 1, 2, 3, 7]]


def test_strided_positions_unroll_the_same_way(finished: EagleTrainer) -> None:
    """The mean of the strided losses over all offsets is the loss of all starts, where a window
    has as many of each."""
    stream = torch.from_numpy(finished.documents.streams[0].ids.astype("int64"))
    seen = finished.run_target(stream[None, :41])  # 39 starts: 13 at each offset
    config, step = finished.config, finished.step
    try:
        with torch.no_grad():
            whole = float(finished.loss_of(seen))
            finished.config = replace(config, stride=3)
            strided = []
            for finished.step in range(3):
                strided.append(float(finished.loss_of(seen)))
    finally:
        finished.config, finished.step = config, step
    assert max(strided) > min(strided)
    assert sum(strided) / 3 == pytest.approx(whole, rel=1e-4)


def test_kernels_and_module_give_the_same_features(finished: EagleTrainer) -> None:
    stream = torch.from_numpy(finished.documents.streams[0].ids.astype("int64"))
    windows = stream[:93].view(3, 31)
    reader = finished._reader
    if reader is None:
        pytest.skip("the kernels cannot be built here")
    read = finished.run_target(windows)
    finished._reader = None
    try:
        said = finished.run_target(windows)
    finally:
        finished._reader = reader
    for name in ("features", "final"):
        torch.testing.assert_close(getattr(read, name), getattr(said, name), rtol=1e-3, atol=1e-3)
    assert read.logits is said.logits is None


# -- training --------------------------------------------------------------------------------


def test_the_head_learns_the_targets_distribution(learnt: training_runs.Learnt) -> None:
    seen, history = learnt.seen, learnt.trainer.history
    assert seen[-1].loss < 0.6 * seen[0].loss
    after = total(seen[-1].acceptance.values()).mean_accepted_length
    assert after > 1.5
    assert after > learnt.before.mean_accepted_length + 0.4
    assert [entry["step"] for entry in history] == [30, 60]
    assert history[-1]["acceptance"]["toy"]["mean_accepted_length"] == pytest.approx(after)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_starts_as_the_last_layers(
    config: EagleTrainConfig, tmp_path: Path, layers: int
) -> None:
    own = replace(config, init="target", held_out=2, layers=layers)
    trainer = EagleTrainer(own, tmp_path, device="cpu")
    head, last = trainer.head, trainer.target.base_model.layers[-layers]
    if layers > 1:
        assert training_runs.same_weights(head.layers["1"], trainer.target.base_model.layers[-1])
    assert torch.equal(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    width = head.config.hidden_size
    assert torch.equal(
        head.midlayer.self_attn.q_proj.weight[:, width:], last.self_attn.q_proj.weight
    )
    rows = trainer.target.get_output_embeddings().weight[head.draft_ids]
    assert torch.equal(head.lm_head.weight, rows)
    with pytest.raises(ConfigError, match="other names or shapes"):
        EagleTrainer(replace(own, ffn_size=8), tmp_path / "other", device="cpu")


@pytest.mark.slow  # it learns
@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_learns_to_draft_in_one_pass(
    config: EagleTrainConfig, tmp_path: Path, layers: int
) -> None:
    """What later rows draft is right far more often than by chance, and as the engine drafts; a
    head without such rows gets them."""
    config = replace(config, layers=layers, own_embedding=layers > 1)
    trainer = EagleTrainer(replace(config, parallel=True), tmp_path, device="cpu")
    before = total(trainer.measure().values())
    trainer.run(lambda _: None, eval_every=60)
    after = total(trainer.measure().values())
    assert after.mean_accepted_length > before.mean_accepted_length + 0.3
    assert after.accepted[1] > 0.25 * after.reached[1] > 2 * before.accepted[1]
    held_out = json.loads((tmp_path / "held_out.json").read_text())["texts"]
    prompts = [text["token_ids"][: text["prompt"]] for text in held_out]
    spec = f"eagle3:{tmp_path / 'head'},nodes=0"
    llm = LLM(config.model, spec, dtype="float32", draft_length=config.draft_length)
    assert llm.engine.drafter.passes(4) == 1
    params = SamplingParams(temperature=0, max_tokens=config.held_out_tokens)
    done = llm.generate(prompts, params)
    assert sum(one.stats.target_steps for one in done) == pytest.approx(after.steps, rel=0.02)
    start = replace(config, parallel=True, init=str(tmp_path / "head"), steps=1)
    again = EagleTrainer(start, tmp_path / "again", device="cpu")
    assert training_runs.same_weights(again.head, trainer.head)


def test_a_head_that_drafts_by_levels_goes_on_in_one_pass(
    finished: EagleTrainer, config: EagleTrainConfig, tmp_path: Path
) -> None:
    start = replace(config, parallel=True, init=str(finished.out / "head"), steps=1, held_out=2)
    trainer = EagleTrainer(start, tmp_path, device="cpu")
    assert torch.equal(trainer.head.fc.weight, finished.head.fc.weight)
    trainer.train_step()
    assert trainer.head.config.mask_token is not None


def test_a_head_goes_on_with_its_own_embedding(
    finished: EagleTrainer, config: EagleTrainConfig, tmp_path: Path
) -> None:
    """It starts as the target's, is trained, and drafts in training as in the engine."""
    start = replace(config, own_embedding=True, init=str(finished.out / "head"), steps=4)
    trainer = train(start, tmp_path)
    embedding, theirs = trainer.head.embed_tokens, trainer.target.get_input_embeddings()
    assert embedding is not None and not torch.equal(embedding.weight, theirs.weight)
    torch.nn.init.normal_(embedding.weight)
    trainer.write_result()
    again = replace(start, own_embedding=False, init=str(tmp_path / "head"))
    loaded = EagleTrainer(again, tmp_path / "again", device="cpu")
    assert loaded.head.embed_tokens is not None
    llm = LLM(config.model, f"eagle3:{tmp_path / 'head'},nodes=0", dtype="float32", draft_length=4)
    assert training_runs.check_held_out(loaded, llm).mean_accepted_length < 1.5
    with pytest.raises(ConfigError, match="has layers 1, but this run 2; give the same --layers"):
        EagleTrainer(replace(again, layers=2), tmp_path / "other", device="cpu")
    with pytest.raises(ConfigError, match="but this run 40; give the same --ffn-size"):
        EagleTrainer(replace(again, ffn_size=40), tmp_path / "other", device="cpu")


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])  # it learns
def test_version_1_predicts_features_and_tokens(
    config: EagleTrainConfig, tmp_path: Path, steps: int
) -> None:
    own = replace(config, version=1, feature_layers=(), draft_vocab_size=0, ttt_steps=steps)
    seen: list[Progress] = []
    trainer = train(replace(own, steps=30), tmp_path, seen.append)
    assert trainer.feature_layers == (3,)
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert total(seen[-1].acceptance.values()).mean_accepted_length > 1.2


def test_the_draft_vocabulary_is_the_most_frequent_tokens(finished: EagleTrainer) -> None:
    stream = torch.from_numpy(finished.documents.streams[0].ids.astype("int64"))
    counts = torch.bincount(stream, minlength=320)
    chosen = finished.head.t2d
    assert int(chosen.sum()) == 150
    assert int(counts[chosen].min()) >= int(counts[~chosen].max())


@pytest.mark.parametrize("cached", [False, True])
def test_a_resumed_run_ends_with_the_same_weights(
    config: EagleTrainConfig, tmp_path: Path, cached: bool
) -> None:
    short = replace(config, steps=6, cache_features=cached, held_out=2)
    whole = train(short, tmp_path / "whole")
    again = training_runs.resumed(
        lambda: EagleTrainer(short, tmp_path / "cut", device="cpu"), 3, eval_every=30
    )
    assert training_runs.same_weights(whole.head, again.head)
    assert again.history == whole.history


def test_cached_features_are_those_of_the_target(config: EagleTrainConfig, tmp_path: Path) -> None:
    own = replace(config, cache_features=True, steps=3, long_every=0)
    trainer = EagleTrainer(own, tmp_path, device="cpu")
    cache = trainer._cache
    assert cache is not None
    for windows in trainer.micro_batches(0):
        first, again = cache.get(windows), cache.get(windows)
        streamed = trainer.run_target(*windows)
        real = torch.arange(windows.ids.shape[1]) < torch.tensor(windows.lengths)[:, None]
        for name in ("ids", "loss_mask", "features", "final"):
            expected = getattr(streamed, name)[real]
            assert torch.equal(getattr(first, name), getattr(again, name))
            near = 0.0 if expected.dtype != torch.float32 else float(expected.abs().max()) / 200
            torch.testing.assert_close(getattr(first, name)[real], expected, rtol=0, atol=near)
        torch.testing.assert_close(
            trainer.loss_of(again), trainer.loss_of(streamed), rtol=0.02, atol=0
        )
    trainer.run()
    files = list((tmp_path / "features").rglob("*.safetensors"))
    assert 0 < len(files) <= len(trainer.documents.pieces)
    files[0].write_bytes(b"damaged")  # found out, and made again
    layers = tuple(max(layer - 1, 0) for layer in trainer.feature_layers)
    beside = tmp_path / "with_draft"
    beside.mkdir()
    (beside / "features").symlink_to(tmp_path / "features")
    others = EagleTrainer(replace(own, feature_layers=layers), beside, device="cpu")
    windows = others.micro_batches(0)[0]
    assert others._cache is not None
    features = others._cache.get(windows).features[0, :4]
    expected = others.run_target(*windows).features[0, :4]
    torch.testing.assert_close(features, expected, rtol=0.01, atol=float(expected.abs().max()) / 50)
    whole = EagleTrainer(own, tmp_path / "again", device="cpu")
    whole.run()
    longer = EagleTrainer(replace(own, steps=6), tmp_path, device="cpu")
    longer.run()


def test_features_of_a_target_that_has_changed_are_made_again(
    config: EagleTrainConfig, tmp_path: Path
) -> None:
    folder, origins = tmp_path / "target", set[str]()
    shutil.copytree(model_path(config.model), folder)
    own = replace(config, model=str(folder), cache_features=True)
    for changed in (False, False, True):
        if changed:
            os.utime(folder / "model.safetensors")
        cache = EagleTrainer(own, tmp_path / "out", device="cpu")._cache
        assert cache is not None
        origins.add(cache.origin)
    assert len(origins) == 2


def test_logits_that_cached_features_do_not_determine(
    config: EagleTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled logits, as Granite's, are not the product of the final hidden states."""
    load = EagleTrainer.load

    def scaled(trainer: EagleTrainer, name: str) -> PreTrainedModel:
        def scale(_: object, __: object, out: Any) -> Any:
            out.logits = out.logits / 3
            return out

        target = load(trainer, name)
        target.register_forward_hook(scale)
        return target

    monkeypatch.setattr(EagleTrainer, "load", scaled)
    EagleTrainer(config, tmp_path / "streamed", device="cpu")
    with pytest.raises(ConfigError, match="leave out --cache-features"):
        EagleTrainer(replace(config, cache_features=True), tmp_path / "cached", device="cpu")


def test_documents_are_packed_every_nth_step(config: EagleTrainConfig, tmp_path: Path) -> None:
    own = replace(config, seq_len=64, max_positions=64, long_every=3)
    trainer = EagleTrainer(own, tmp_path, device="cpu")
    batches = [trainer.micro_batches(step) for step in range(6)]
    assert [all(len(part.lengths) == 1 for part in parts) for parts in batches] == [
        False,
        False,
        True,
    ] * 2


def test_only_the_loss_mask_counts(finished: EagleTrainer) -> None:
    """What stands before is read, what does not count changes nothing."""
    ids = torch.from_numpy(finished.documents.streams[0].ids[:30].astype("int64"))[None]
    loss_mask = torch.zeros_like(ids, dtype=torch.bool)
    loss_mask[0, 12:20] = True
    other = ids.clone()
    other[0, 25:] = other[0, 25:].flip(0)
    with torch.no_grad():
        loss = float(finished.loss_of(finished.run_target(ids, loss_mask)))
        assert float(finished.loss_of(finished.run_target(other, loss_mask))) == pytest.approx(loss)
        assert float(finished.loss_of(finished.run_target(ids))) != pytest.approx(loss)
        before = ids.clone()
        before[0, 3] = (before[0, 3] + 1) % 300
        assert float(finished.loss_of(finished.run_target(before, loss_mask))) != pytest.approx(
            loss
        )


def test_padding_at_the_end_changes_nothing(finished: EagleTrainer) -> None:
    ids = torch.from_numpy(finished.documents.streams[0].ids[:30].astype("int64"))[None]
    padded, loss_mask = F.pad(ids, (0, 9)), F.pad(torch.ones_like(ids, dtype=torch.bool), (0, 9))
    with torch.no_grad():
        expected = float(finished.loss_of(finished.run_target(ids)))
        assert float(finished.loss_of(finished.run_target(padded, loss_mask))) == pytest.approx(
            expected
        )


@pytest.mark.parametrize(("version", "layers"), [(1, 1), (3, 1), (3, 3)])
def test_the_loss_is_that_of_single_drafts(
    config: EagleTrainConfig, tmp_path: Path, version: int, layers: int
) -> None:
    """The unrolled loss against cross-entropies of one draft after the other, written out."""
    own = replace(config, argmax_weight=0.0, step_decay=0.5, feature_weight=0.0, token_weight=1.0)
    if version == 1:
        own = replace(own, version=1, feature_layers=(), draft_vocab_size=0)
    own = replace(own, layers=layers, own_embedding=layers > 1)
    trainer = EagleTrainer(own, tmp_path, device="cpu")
    head = trainer.head
    if head.embed_tokens is not None:  # it differs from the target's, as after some steps
        torch.nn.init.normal_(head.embed_tokens.weight)
    ids = torch.from_numpy(trainer.documents.streams[0].ids[:14].astype("int64"))[None]
    loss_mask = torch.ones_like(ids, dtype=torch.bool)
    loss_mask[0, :5] = False
    everything = torch.arange(head.config.draft_vocab_size)
    with torch.no_grad():
        seen = trainer.run_target(ids, loss_mask)
        found = float(trainer.loss_of(seen))
        out = trainer.target(input_ids=ids)
        probs = out.logits[0][:, head.to_target_ids(everything)].softmax(-1)
        total_loss = 0.0
        for t in range(3, 12):
            for j, logits in enumerate(chain_logits(trainer, seen, t)):
                known = version == 1 or (t + 2 + j < 14 and bool(head.t2d[ids[0, t + 2 + j]]))
                if t + 2 + j < 14 and known:
                    nats = -(probs[t + 1 + j] * logits.log_softmax(-1)).sum()
                    total_loss += 0.5**j / 1.75 * float(nats)
    assert found == pytest.approx(total_loss / 9, rel=1e-4)


def chain_logits(trainer: EagleTrainer, seen: TargetOutputs, t: int) -> list[torch.Tensor]:
    """Logits of three steps from position t, the text's own tokens standing in for drafted ones."""
    rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scaling: float
    ) -> torch.Tensor:
        fresh = layer not in rows
        rows.setdefault(layer, []).append((key, value))
        k, v = (torch.cat(parts, 2) for parts in zip(*rows[layer], strict=True))
        out = F.scaled_dot_product_attention(
            query, k, v, is_causal=fresh, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    head = trainer.head
    embed = head.embed_tokens or trainer.target.get_input_embeddings()
    embeds, fused = embed(seen.ids[0]), head.fuse(seen.features[0])
    hidden = head(embeds[1 : t + 2], fused[: t + 1], torch.arange(t + 1), attend)[-1:]
    found = [head.logits(hidden)[0]]
    for j in (1, 2):
        if t + 1 + j >= len(embeds):
            break
        hidden = head(embeds[t + 1 + j : t + 2 + j], hidden, torch.tensor([t + j]), attend)
        found.append(head.logits(hidden)[0])
    return found


# -- what comes out --------------------------------------------------------------------------


def test_held_out_acceptance_is_what_the_engine_measures(
    finished: EagleTrainer, talking: str
) -> None:
    spec, length = f"eagle3:{finished.out / 'head'},nodes=0", finished.config.draft_length
    llm = LLM(talking, spec, dtype="float32", device="cpu", draft_length=length)
    # Or the comparison would say little.
    assert training_runs.check_held_out(finished, llm).mean_accepted_length > 1.5


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"feature_layers": (1, 9)}, ConfigError, r"feature layers \[9\] do not exist"),
        ({"version": 1, "feature_layers": (1, 2)}, ConfigError, "one target layer"),
        ({"data": ("no.jsonl",)}, DataError, "no.jsonl does not exist"),
        ({"model": "./no-model"}, ModelLoadError, "no tokenizer in ./no-model|does not exist"),
        ({"argmax_weight": 1.5}, ConfigError, "--argmax-weight is 1.5; it can be at most 1"),
        ({"ttt_steps": 0}, ConfigError, "--ttt-steps"),
    ],
)
def test_invalid_options_are_refused_and_leave_no_files(
    config: EagleTrainConfig,
    tmp_path: Path,
    changes: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    out = tmp_path / "run"
    with pytest.raises(error, match=message) as caught:
        EagleTrainer(replace(config, **changes), out, device="cpu")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": ""}'], "no usable records"),
        (['{"text": "h"}'], "no document of 4 tokens or more"),
        (['{"story": "hello"}'], "line 1: it has none of the fields"),
    ],
)
def test_a_file_without_usable_text_is_refused(
    config: EagleTrainConfig, tmp_path: Path, lines: list[str], message: str
) -> None:
    file, out = tmp_path / "bad.jsonl", tmp_path / "run"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        EagleTrainer(replace(config, data=(*config.data, str(file))), out, device="cpu")
    assert not out.exists() or [path.name for path in out.iterdir()] == ["tokens"]


def test_a_folder_with_another_run_is_refused(
    config: EagleTrainConfig, finished: EagleTrainer
) -> None:
    with pytest.raises(ConfigError, match=r"other options \(lr, ttt_steps\)"):
        EagleTrainer(replace(config, lr=0.5, ttt_steps=2), finished.out, device="cpu")
    longer = EagleTrainer(replace(config, steps=90), finished.out, device="cpu")
    assert longer.step == 60


def test_a_damaged_checkpoint_is_named(config: EagleTrainConfig, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged"):
        EagleTrainer(config, tmp_path, device="cpu")
