"""Adapters: a request's text is the merged model's, and the same with every drafter."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from paceline import LLM, ConfigError, SamplingParams
from paceline.draft.selfspec import SelfDrafter
from paceline.drafters import DRAFTERS
from paceline.model.loading import read_config
from paceline.model.lora import Adapters
from support.cache_invariants import check_cache
from support.engine_models import write_pair
from support.every_drafter import write_texts
from support.made_adapters import write_adapter, write_merged
from support.medusa_models import write_medusa
from support.mtp_models import write_mtp
from support.random_heads import write_block, write_eagle

PROMPTS: list[str | list[int]] = [
    "Once upon a time there was",
    "The quick brown fox jumps over the lazy dog, and the dog",
    "What is 12 + 30? What is 12 + 30? What is",
]
MIXED = ["one", None, "two", "one"]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
REQUESTS = {"greedy": GREEDY, "seeded": replace(GREEDY, temperature=0.8, seed=3)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    target, draft = write_pair(root)
    one = write_adapter(root / "one", target, rank=4, lora_alpha=8, use_rslora=True)
    two = write_adapter(root / "two", target, rank=64, seed=1, modules=("q_proj", "down_proj"))
    return {
        "target": target,
        "draft": draft,
        "one": one,
        "two": two,
        "merged one": write_merged(root / "merged one", target, one, 8 / 4**0.5),
        "merged two": write_merged(root / "merged two", target, two),
        "mtp": write_mtp(root / "mtp", read_config("target", target)),
        "medusa": write_medusa(root / "medusa", target, heads=4, layers=2, shared=True),
        "eagle": write_eagle(root, target, 1),
        "eagle3": write_eagle(root, target, 3),
        "dflash": write_block(root, target, "dflash"),
        "dspark": write_block(root, target, "dspark"),
    }


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request: pytest.FixtureRequest, folders: dict[str, str]) -> Iterator[LLM]:
    lora = {name: folders[name] for name in ("one", "two")}
    options = {"dtype": "float32", "backend": request.param}
    made = LLM(folders["target"], draft="none", lora=lora, **options)
    assert made.target.backend.name == request.param
    yield made
    made.close()


def mixed(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """Answers to all prompts with and without adapters, in one batch."""
    prompts = [prompt for prompt in PROMPTS for _ in MIXED]
    done = llm.generate(prompts, [replace(params, lora=name) for name in MIXED * len(PROMPTS)])
    check_cache(llm.engine.cache)
    return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[str, list[list[int]]]:
    return {name: mixed(llm, params) for name, params in REQUESTS.items()}


@pytest.mark.parametrize("name", ["one", "two"])
def test_text_is_the_merged_model_s(llm: LLM, folders: dict[str, str], name: str) -> None:
    merged = LLM(folders[f"merged {name}"], draft="none", dtype="float32")
    for params in REQUESTS.values():
        ours = llm.generate(PROMPTS, replace(params, lora=name))
        theirs = merged.generate(PROMPTS, params)
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
        base = llm.generate(PROMPTS, params)
        assert [c.token_ids for c in ours] != [c.token_ids for c in base]
    merged.close()


def test_requests_of_one_batch_have_their_own(llm: LLM, plain: dict[str, list[list[int]]]) -> None:
    for request, texts in plain.items():
        alone = [
            llm.generate(prompt, replace(REQUESTS[request], lora=name))[0].token_ids
            for prompt in PROMPTS
            for name in MIXED
        ]
        assert texts == alone


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "none"])
def test_drafted_text_is_plain_text(
    llm: LLM,
    plain: dict[str, list[list[int]]],
    folders: dict[str, str],
    tmp_path: Path,
    kind: str,
) -> None:
    """On the native backend of every example of a kind, on the slower one of the first; of that
    also with what it remembers."""
    folders = folders | {"datastore": write_texts(tmp_path, folders["target"], plain["greedy"] * 2)}
    examples = DRAFTERS[kind].examples
    for example in examples if llm.target.backend.name == "native" else examples[:1]:
        drafted = llm.with_draft(example.format(**folders), draft_length=4)
        for name in (*REQUESTS, *(["greedy"] if example == examples[0] else [])):
            assert mixed(drafted, REQUESTS[name]) == plain[name], example
        drafted.close()


def test_a_self_draft_has_the_request_s_adapter(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, it drafts what the model says without one."""
    shares = []
    for adapts in (True, False):
        monkeypatch.setattr(SelfDrafter, "runs_adapters", adapts)
        drafted = llm.with_draft("quantized:int8", draft_length=4)
        done = drafted.generate(PROMPTS, replace(GREEDY, max_tokens=24, lora="one"))
        drafts = sum(out.stats.drafted_tokens for out in done)
        shares.append(sum(out.stats.accepted_tokens for out in done) / drafts)
        drafted.close()
    assert shares[0] > 0.9 > 1.5 * shares[1]


def test_caches_and_memories_are_kept_apart(llm: LLM) -> None:
    prompt = [7] * 40
    cached = llm.with_draft("suffix")
    pool = cached.engine.cache
    for name in (None, "one", "two"):
        adapter = llm.adapters.named(name)
        number = 0 if adapter is None else adapter.number
        assert not pool.shared_blocks(prompt, number)
        cached.generate(prompt, replace(GREEDY, lora=name))
        assert pool.shared_blocks(prompt, number)
    cached.close()


def test_an_adapter_loads_and_unloads_beside_requests(
    llm: LLM, folders: dict[str, str], plain: dict[str, list[list[int]]]
) -> None:
    llm.adapters.load("three", folders["one"])
    stream = llm.stream(PROMPTS[0], replace(GREEDY, lora="three"))
    tokens = list(next(stream).token_ids)
    llm.adapters.unload("three")
    for event in stream:
        tokens += event.token_ids
    assert tokens == plain["greedy"][0]
    with pytest.raises(ConfigError, match="no adapter 'three' is loaded; there are: one, two"):
        llm.generate(PROMPTS[0], replace(GREEDY, lora="three"))
    for name in (None, "four", ["one"]):
        with pytest.raises(ConfigError, match=r"no adapter .* is loaded; there are: one, two"):
            llm.adapters.unload(name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loaded already"):
        llm.adapters.load("one", folders["two"])


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", None), ("bfloat16", "int8")])
def test_other_precisions(folders: dict[str, str], dtype: str, quantize: str | None) -> None:
    lora = {name: folders[name] for name in ("one", "two")}
    options = {"dtype": dtype, "quantize": quantize, "backend": "native"}
    llm = LLM(folders["target"], draft="none", lora=lora, **options)
    drafted = [llm.with_draft(kind, draft_length=4) for kind in ("ngram", "quantized")]
    for params in REQUESTS.values():
        plain = mixed(llm, params)
        pairs = [(prompt, name) for prompt in PROMPTS for name in MIXED]
        assert plain == [
            llm.generate(p, replace(params, lora=name))[0].token_ids for p, name in pairs
        ]
        assert plain[:4] != plain[:1] * 4
        assert all(mixed(other, params) == plain for other in drafted)


@pytest.mark.parametrize("lora", [5, {"one"}, ["one", "two"]])
def test_what_names_no_adapter(lora: Any) -> None:
    with pytest.raises(ConfigError, match="give the name of a loaded adapter"):
        SamplingParams(lora=lora)


@pytest.mark.parametrize("lora", ["folder", ["folder"], {1: "folder"}, {"": "folder"}])
def test_what_is_no_table_of_adapters(llm: LLM, lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"give adapters as \{name: folder\}|has no name"):
        Adapters(llm.target, lora)


@pytest.mark.parametrize("kind", ["ngram", "suffix", "recycling", "quantized"])
def test_nothing_keeps_an_unloaded_adapter(llm: LLM, folders: dict[str, str], kind: str) -> None:
    drafted = llm.with_draft(kind, draft_length=4)
    adapter = ref(llm.adapters.load("gone", folders["one"]))
    drafted.generate(PROMPTS, replace(GREEDY, lora="gone"))
    llm.adapters.unload("gone")
    gc.collect()
    assert adapter() is None
    drafted.close()
