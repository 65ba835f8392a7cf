"""``auto``: which drafters are loaded for a target, and why the others are not."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.draft import auto
from paceline.draft.auto import Circumstances, compose, made_for
from paceline.drafters import DFlash, DraftSpec, DSpark, Eagle3, Medusa
from paceline.lab.doctor import examine
from paceline.lab.export import export
from paceline.llm import LLM
from paceline.server.wire import Facts
from support.asking import ask
from support.random_heads import write_eagle
from support.running_server import serve, service_of
from support.tiny_models import write_tiny_model

LARGE = Circumstances("any/model", "", 16, 512 << 20, 160 << 20, 8 << 30)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 1 << 22}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


def members(it: Circumstances) -> list[str]:
    return [str(member) for member, _ in compose(it).taken]


# -- which are taken -------------------------------------------------------------------------------


def test_look_ups_and_the_targets_own_form() -> None:
    found = compose(LARGE)
    assert str(found.spec) == "hybrid:suffix+ngram+quantized:int4"
    lookups = "suffix (needs no model), ngram (needs no model)"
    line = f"draft auto: {lookups}, quantized:int4 (takes 160 MiB more)"
    assert found.line() == line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 4}, "the target is held in 4 bits"),
        ({"refused": "layers stay on disk"}, "it takes the native kernels (layers stay on disk)"),
        ({"refused": "the device is cuda:0"}, "it takes the native kernels (the device is cuda:0)"),
        ({"weight_bytes": 20 << 20}, "the target's 20 MiB fit the processor's caches"),
        ({"free_bytes": 200 << 20}, "it takes 160 MiB of 200 MiB that are free"),
        ({"free_bytes": -1 << 30}, "it takes 160 MiB of 0 MiB that are free"),
    ],
)
def test_what_cannot_pay_is_left_out_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    found = compose(replace(LARGE, **changes))
    assert str(found.spec) == "hybrid:suffix+ngram"
    assert found.line().endswith(f"; not quantized:int4: {reason}")


def test_an_eight_bit_target_has_a_form_in_four_and_its_head() -> None:
    target = replace(LARGE, bits=8)
    assert members(target) == ["suffix", "ngram", "quantized:int4"]
    head = "eagle3:paceline/smollm2-eagle3"
    for bits, heads in ((16, []), (8, [head])):
        target = replace(LARGE, name="paceline/smollm2", bits=bits)
        assert members(target) == ["suffix", "ngram", *heads, "quantized:int4"]


def test_what_is_shipped_for_a_target() -> None:
    toy = replace(LARGE, name="paceline/tiny", weight_bytes=20 << 20)
    assert members(toy) == ["suffix", "ngram", "eagle3:paceline/tiny-eagle3"]
    assert "(shipped for it)" in compose(toy).line()
    folder = str(Path(auto.__file__).parents[1] / "assets" / "tiny")
    assert made_for(folder) == (Eagle3("paceline/tiny-eagle3"), "shipped for it")


def test_a_draft_model_as_large_as_the_target_is_left_out(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", layers=1, seed=1)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    write_tiny_model(tmp_path / "target-draft", layers=1, seed=1)
    small = replace(LARGE, name=str(target), weight_bytes=size)
    assert members(small) == ["suffix", "ngram"]
    assert "it has 100% of the target's bytes" in compose(small).line()
    assert members(replace(small, weight_bytes=10 * size))[-1] == f"model:{target}-draft"


def test_a_head_is_left_out_where_it_has_a_fifth_of_the_targets_bytes() -> None:
    four = replace(LARGE, name="paceline/smollm2", bits=4, weight_bytes=120 << 20)
    assert members(four) == ["suffix", "ngram", "eagle3:paceline/smollm2-eagle3"]
    four = replace(four, weight_bytes=110 << 20)
    assert members(four) == ["suffix", "ngram"]
    assert "not eagle3:paceline/smollm2-eagle3: it has 21% of the target's" in compose(four).line()


# -- what was trained for a target -----------------------------------------------------------------


def head(folder: Path, config: dict[str, Any], card: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if card:
        (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize("place", ["target/eagle3", "target-eagle3"])
def test_a_head_beside_the_checkpoint_by_its_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "target").mkdir()
    found = head(tmp_path / place, {})
    assert made_for(str(tmp_path / "target")) == (Eagle3(str(found)), "beside the target")


@pytest.mark.parametrize("name", ["target/answers.datastore", "target.datastore"])
def test_a_datastore_beside_the_checkpoint(tmp_path: Path, name: str) -> None:
    target = replace(LARGE, name=str(tmp_path / "target"))
    (tmp_path / "target").mkdir()
    assert members(target) == ["suffix", "ngram", "quantized:int4"]
    (tmp_path / name).touch()
    assert members(target) == ["suffix", "ngram", f"datastore:{tmp_path / name}", "quantized:int4"]


SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"verifier": {"name_or_path": "owner/target"}},
}


def test_a_head_beside_the_checkpoint_by_its_config(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    other = {"verifier": {"name_or_path": "owner/other"}}
    head(tmp_path / "a", {**SPECULATORS, "speculators_config": other})
    head(
        tmp_path / "b", {"architectures": ["LlamaForCausalLM"], "base_model_name_or_path": "target"}
    )
    for number, damaged in enumerate(([], {"verifier": "x"}, "x")):  # an AttributeError once
        head(tmp_path / f"d{number}", {**SPECULATORS, "speculators_config": damaged})
    assert made_for(str(target)) is None, "another's, and no head"
    found = head(tmp_path / "c", SPECULATORS)
    assert made_for(str(target)) == (Eagle3(str(found)), "beside the target")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    return tmp_path


def in_cache(hub: Path, name: str, config: dict[str, Any], card: str = "") -> Path:
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    return head(repository / "snapshots" / "abc", config, card)


def test_a_head_in_the_hubs_cache(hub: Path) -> None:
    eagle = {"architectures": ["LlamaForCausalLMEagle3"]}
    in_cache(hub, "a/unnamed", eagle, "no front matter\nbase_model: owner/target\n")
    in_cache(hub, "b/other", eagle, "---\nbase_model:\n- owner/another\n---\n")
    assert made_for("owner/target") is None
    found = in_cache(
        hub, "c/head", eagle, "---\nbase_model:\n  - owner/target\nlicense: mit\n---\n"
    )
    assert made_for("owner/target") == (Eagle3(str(found)), "in the hub's cache")


@pytest.mark.parametrize(
    ("config", "record"),
    [
        ({"architectures": ["DFlashDraftModel"]}, DFlash),
        ({"architectures": ["Qwen3DSparkModel"]}, DSpark),
        ({"speculators_model_type": "dflash"}, DFlash),
        ({"speculators_model_type": "dspark"}, DSpark),
        ({"speculators_model_type": "peagle"}, Eagle3),
    ],
)
def test_block_drafters_are_found_like_heads(
    hub: Path, tmp_path: Path, config: dict[str, Any], record: type[DraftSpec]
) -> None:
    found = in_cache(hub, "a/head", {**config, "base_model_name_or_path": "owner/target"})
    assert made_for("owner/target") == (record(str(found)), "in the hub's cache")
    target = tmp_path / "a" / "target"
    target.mkdir(parents=True)
    beside = head(tmp_path / "a" / f"target-{record.weights}", config)
    assert made_for(str(target)) == (record(str(beside)), "beside the target")


def test_heads_of_other_formats_in_the_hubs_cache(hub: Path) -> None:
    medusa = in_cache(
        hub, "a/medusa", {"model_type": "medusa", "base_model_name_or_path": "owner/target"}
    )
    assert made_for("owner/target") == (Medusa(str(medusa)), "in the hub's cache")
    (hub / "models--broken").mkdir()
    in_cache(hub, "b/other", {"speculators_model_type": "mlp"})
    assert made_for("owner/unknown") is None


# -- loaded ----------------------------------------------------------------------------------------


@pytest.fixture
def large_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow heads of any size: those of these tests are as large as their targets."""
    monkeypatch.setattr(auto, "_MAX_HEAD_SHARE", 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a head of its own beside it, and Medusa heads that are damaged."""
    from support.engine_models import write_pair

    root = tmp_path_factory.mktemp("auto")
    target = Path(write_pair(root)[0])
    write_eagle(root, str(target), 3)
    (root / "eagle3").rename(target / "eagle3")
    return target


@pytest.mark.usefixtures("large_heads")
def test_it_is_what_an_llm_drafts_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_MIN_BYTES", 0)
    llm = LLM(str(folder), **OPTIONS)
    assert llm.drafters == ("auto",)
    composed, line = llm.drafts[0], llm.setup_notes[-1]
    own = "quantized:int4" if llm.target.backend.name == "native" else f"eagle3:{folder}/eagle3"
    assert composed == f"hybrid:suffix+ngram+{own}" and own in line
    plain = LLM(str(folder), draft=None, **OPTIONS)
    assert (plain.drafters, plain.drafts, plain.setup_notes) == (("none",), ("none",), ())
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True, draft_length=3),
        SamplingParams(max_tokens=24, ignore_eos=True, draft_length=3, temperature=1.0, seed=4),
    ):
        drafted, alone = (each.generate([PROMPT], params)[0] for each in (llm, plain))
        assert drafted.token_ids == alone.token_ids
        assert drafted.stats.drafted_tokens and not alone.stats.drafted_tokens
    facts = Facts.of(llm)
    assert (facts.drafters, facts.drafts) == (("auto",), (composed,))


@pytest.mark.usefixtures("large_heads")
def test_a_head_that_cannot_be_loaded_is_left_out(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", layers=1, seed=9)
    (other / "eagle3").symlink_to(folder / "eagle3")
    llm = LLM(str(other), **OPTIONS)
    assert llm.drafts == ("hybrid:suffix+ngram",)
    assert f"; not eagle3:{other}/eagle3: the EAGLE head {other}/eagle3" in llm.setup_notes[-1]


@pytest.mark.usefixtures("large_heads")
@pytest.mark.parametrize(
    "how", [{"backend": "reference"}, {"backend": "reference", "offload": "disk"}]
)
def test_elsewhere_the_head_takes_the_place_of_the_own_form(
    folder: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_MIN_BYTES", 0)
    if "offload" in how:
        how = {**how, "weights_memory": 0}
    llm = LLM(str(folder), **how, **OPTIONS)
    assert llm.drafts == (f"hybrid:suffix+ngram+eagle3:{folder}/eagle3",)
    assert "not quantized:int4: it takes the native kernels" in llm.setup_notes[-1]


@pytest.mark.usefixtures("large_heads")
def test_the_tools_name_it(folder: Path) -> None:
    (line,) = [f.text for f in examine(str(folder), "auto") if f.code == "draft-auto"]
    assert line.startswith(
        f"draft auto: suffix (needs no model), ngram (needs no model), eagle3:{folder}/eagle3"
    )
    made = export("vllm", str(folder), "auto")
    assert made.config["method"] == "eagle3"
    assert export("vllm", "any/model", "auto").config["method"] == "ngram"


def test_a_server_says_what_it_took(folder: Path) -> None:
    llm = LLM(str(folder), ["auto", "ngram"], **OPTIONS)
    with contextmanager(serve)(service_of(llm, "m")) as server:
        said = ask(server.url, "/version").json["drafters"]
    assert said == dict(zip(llm.drafters, llm.drafts, strict=True))
    assert list(said) == ["auto", "ngram"] and said["auto"].startswith("hybrid:suffix+ngram")
