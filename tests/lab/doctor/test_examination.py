"""The whole examination: healthy pairs, kinds of draft, context, sizes, architectures."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from paceline.build import EngineOptions
from paceline.errors import ConfigError, ModelLoadError
from paceline.lab.doctor import Finding, Severity, examine, findings
from paceline.lab.doctor.findings import KINDS, by_severity, finding, record
from paceline.lab.doctor.machine import Setting, size, weight_bytes
from paceline.lab.doctor.models import describe, read_files
from paceline.model.backends.base import REFERENCE
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel
from support.doctor_folders import Copy, codes, only
from support.engine_models import random_recurrent
from support.recurrent_models import RECURRENT

TARGET = "paceline/tiny"
HEALTHY = {
    "paceline/tiny-draft": set(),
    "tree:paceline/tiny-draft,branching=2x2x1": set(),
    "eagle:paceline/tiny-eagle": set(),
    "eagle2:paceline/tiny-eagle,nodes=8": set(),
    "eagle3:paceline/tiny-eagle3": {"head-vocabulary-reduced"},
    "medusa:paceline/tiny-medusa": set(),
    "ngram:min=2,max=4": set(),
    "suffix": set(),
    "lookahead": set(),
    "recycling:k=4": set(),
    "early_exit:layers=4": {"draft-own-layers"},
    "layer_skip": {"draft-own-layers"},
    "layer_skip:skip=2x3x4x5": {"draft-own-layers"},
    "quantized": {"draft-own-weights"},
    "none": {"draft-none"},
}


@pytest.mark.parametrize("spec", HEALTHY)
def test_the_embedded_pair_is_healthy(spec: str) -> None:
    findings = examine(TARGET, spec)
    assert codes(findings) == HEALTHY[spec]
    assert {item.severity for item in findings} <= {Severity.NOTE, Severity.OK}


def test_no_draft_equals_draft_none() -> None:
    ours, theirs = examine(TARGET), examine(TARGET, "none")
    assert [item.code for item in ours] == [item.code for item in theirs]


def test_members_of_a_hybrid_are_numbered() -> None:
    head = "eagle3:paceline/tiny-eagle3"
    drafts: list[str | list[str]] = [f"hybrid:ngram+{head}", ["ngram", head]]
    for draft in drafts:
        findings = examine(TARGET, draft)
        assert only(findings, "draft-free").about == "draft 1 (ngram)"
        assert only(findings, "head-fits").about == "draft 2 (eagle3)"
    plain = only(examine(TARGET), "memory-fits").text
    assert only(findings, "memory-fits").text.partition(",")[0] != plain.partition(",")[0]


def test_draft_from_the_targets_layers() -> None:
    assert "4 of the target's 12" in only(examine(TARGET, "early_exit"), "draft-own-layers").text
    noticed = only(examine(TARGET, "layer_skip:skip=2x3x4x5x8"), "draft-own-layers").text
    assert "7 of the target's 12" in noticed


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "ngram:minimum=2",
        "early_exit:layers=12",
        "early_exit:size=2",
        "layer_skip:skip=0x30",
        "layer_skip:depth=3",
        "recycling:share=perhaps",
        "quantized:int3",
        "model",
        "tree:paceline/tiny-draft,nodes=-1",
        "model:paceline/tiny-draft,colour=red",
        "hybrid:ngram+unknown",
    ],
)
def test_invalid_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        examine(TARGET, spec)
    assert "\n" not in str(caught.value)


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(ModelLoadError) as caught:
            examine(*arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    missing = str(tmp_path / "nowhere")
    assert "does not exist" in refused(missing)
    assert "does not exist" in refused(TARGET, missing)
    assert "does not exist" in refused(TARGET, f"eagle3:{missing}")
    assert "no config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refused(str(tmp_path))
    assert "not valid JSON" in refused(TARGET, f"medusa:{tmp_path}")
    (tmp_path / "config.json").write_text("[1]")
    assert "no JSON object" in refused(str(tmp_path))
    assert "no built-in model" in refused("paceline/huge")
    assert "give the path" in refused("someone/far-away")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        examine(TARGET, dtype="int3")
    with pytest.raises(ConfigError, match="device"):
        examine(TARGET, device="cuda:77")


# -- architecture --------------------------------------------------------------------------------


def test_architectures_that_are_refused(copy: Copy) -> None:
    folder = copy("tiny-draft").config(model_type="bloom")
    noticed = only(examine(str(folder)), "architecture-refused")
    assert (noticed.severity, noticed.about) == (Severity.ERROR, "target")
    assert "bloom" in noticed.text
    noticed = only(examine(TARGET, str(folder.config(model_type="mamba"))), "architecture-refused")
    assert noticed.about == "draft"
    assert "rolled back" in noticed.text
    noticed = only(examine(str(folder.config(model_type="llama9"))), "architecture-refused")
    assert "config.json" in noticed.text and "transformers" in noticed.cure


def test_recurrent_layers(copy: Copy) -> None:
    layers = ["conv", "full_attention"]
    folder = copy("tiny-draft").config(model_type="lfm2", layer_types=layers, num_hidden_layers=2)
    noticed = only(examine(str(folder)), "recurrent-layers")
    assert noticed.severity is Severity.NOTE and "1 of 2 layers" in noticed.text


@pytest.mark.parametrize("kind", sorted(RECURRENT))
def test_recurrent_states_take_memory(tmp_path: Path, kind: str) -> None:
    module = random_recurrent(kind)
    module.save_pretrained(tmp_path)
    target = CausalModel(module, kind)
    options: dict[str, Any] = {"dtype": "float32", "max_batch_size": 2}
    noticed = examine(str(tmp_path), kv_cache_memory=8 << 20, **options)
    told = only(noticed, "recurrent-layers").text
    assert f": {size(target.state_bytes)} per sequence, and as much again per node of" in told
    text = next(one.text for one in noticed if one.code in ("memory-fits", "cache-partial"))
    assert f"{size(24 * target.state_bytes)} for 24 states of recurrent layers" in text
    short = examine(str(tmp_path), kv_cache_memory=6 * target.state_bytes, **options)
    assert "2 sequences need 6 states" in only(short, "memory-short").text


def test_code_in_model_folders_is_not_run(copy: Copy) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    folder = copy("tiny-draft").config(**code)
    assert only(examine(str(folder)), "remote-code").severity is Severity.NOTE
    folder.config(model_type="own")
    assert only(examine(str(folder)), "remote-code").severity is Severity.ERROR


def test_quantised_weights(copy: Copy) -> None:
    kept = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = copy("tiny-draft").config(quantization_config=kept)
    noticed = only(examine(TARGET, str(folder)), "quantised-kept")
    assert noticed.severity is Severity.NOTE and "gptq, 4 bits" in noticed.text
    twice = only(examine(TARGET, str(folder), draft_quantize="int8"), "quantised-twice")
    assert (twice.severity, twice.about) == (Severity.ERROR, "draft")
    folder.config(quantization_config={"quant_method": "fp8"})
    noticed = only(examine(TARGET, str(folder)), "quantised")
    assert noticed.severity is Severity.WARNING and "the package kernels" in noticed.text


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_memory_of_a_model_quantised_when_loaded(precision: str, backend: str) -> None:
    """Compares with the numbers of a loaded model."""
    plain = examine(TARGET, dtype="float32", device="cpu")
    rounded = examine(TARGET, dtype="float32", device="cpu", quantize=precision)
    noticed = only(rounded, "quantised-when-loaded")
    assert noticed.severity is Severity.NOTE and precision in noticed.text
    model = CausalModel.load(TARGET, "float32", "cpu", quantize=precision, backend=backend)
    if model.backend.name != backend:
        pytest.skip("there are no native kernels here")
    linear = [m.quantised for m in model.hf.modules() if isinstance(m, QuantisedLinear)]
    packed = {id(m.packed): m.packed for m in model.hf.modules() if isinstance(m, PackedLinear)}
    assert bool(linear) == (backend == REFERENCE) != bool(packed)
    exact = sum(part.data.nbytes for part in packed.values())
    for weight in linear:
        parts = (weight.codes, weight.scales, weight.offsets)
        exact += sum(part.nbytes for part in parts if part is not None)
    exact += sum(p.numel() * 4 for p in model.hf.parameters())
    files = read_files(TARGET)
    described, _ = describe(files, "target")
    assert described is not None
    options = EngineOptions(device="cpu", dtype="float32", quantize=precision, backend=backend)
    setting = Setting.of(options)
    foreseen = weight_bytes(described, setting)
    assert foreseen == pytest.approx(exact, rel=0.02)  # a scale a row of eight bits is left out
    assert only(plain, "memory-fits").text != only(rounded, "memory-fits").text
    assert only(plain, "memory-fits").text.endswith("of 1,024 need")
    assert only(examine(TARGET, max_model_len=64), "memory-fits").text.endswith("of 64 need")


def test_a_draft_in_fewer_bits_takes_memory() -> None:
    plain = only(examine(TARGET, "ngram"), "memory-fits").text
    assert only(examine(TARGET, "quantized:int4"), "memory-fits").text != plain
    same = examine(TARGET, "quantized:int8", quantize="int8")
    assert only(same, "draft-as-target").severity is Severity.ERROR
    assert "draft-own-weights" in codes(examine(TARGET, "quantized:int4", quantize="int8"))
    small, draft = "model:paceline/tiny-draft", "model:paceline/tiny-draft,quantize=int4"
    assert "int4" in only(examine(TARGET, draft), "quantised-when-loaded").text
    whole = only(examine(TARGET, small), "memory-fits").text
    assert only(examine(TARGET, draft), "memory-fits").text != whole


def test_which_kernels_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(examine(TARGET, backend="reference"), "kernels-run").severity is Severity.OK
    few = examine(TARGET, backend="reference", quantize="int8")
    assert only(few, "kernels-readable").severity is Severity.WARNING
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PACELINE_NATIVE_CACHE", str(tmp_path))  # nothing is built there
    assert "no-such-compiler" in only(examine(TARGET), "kernels-absent").text
    assert "no-such-compiler" in only(examine(TARGET, quantize="int4"), "kernels-readable").text
    with pytest.raises(ConfigError, match="int3"):
        examine(TARGET, quantize="int3")


# -- context and size ----------------------------------------------------------------------------


def test_a_draft_with_a_short_context(copy: Copy) -> None:
    folder = copy("tiny-draft").config(max_position_embeddings=512)
    noticed = only(examine(TARGET, str(folder)), "draft-context-short")
    assert noticed.severity is Severity.WARNING
    assert "512" in noticed.text and "1,024" in noticed.text
    assert "context-covered" in {f.code for f in examine(str(folder), "paceline/tiny-draft")}


# -- the list ------------------------------------------------------------------------------------


def test_the_worst_comes_first(copy: Copy) -> None:
    folder = copy("tiny-draft").config(max_position_embeddings=512, tie_word_embeddings=False)
    noticed = [item.severity for item in examine(TARGET, str(folder))]
    assert noticed == sorted(noticed, key=list(Severity).index)
    assert {Severity.ERROR, Severity.WARNING, Severity.OK} <= set(noticed)


def test_findings_as_records() -> None:
    item = finding("tensors-refused", "a weight is missing")
    (stored,) = json.loads(json.dumps(record("m", "d", [item])))["findings"]
    assert stored["severity"] == "error"
    assert stored["cure"] == KINDS["tensors-refused"].cure
    assert finding("tensors-refused", "it", "Do so.").cure == "Do so."
    assert finding("weights-not-finite", name="a weight").text == "a weight holds NaN or infinity"
    with pytest.raises(AssertionError):
        finding("tensors-refused", "it", severity=Severity.NOTE)
    assert by_severity([finding("draft-free", ""), item])[0] is item


def test_the_page_has_every_finding() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    assert Path(findings.__file__).with_name("kinds.md").read_text(encoding="utf-8") in page
    assert set(re.findall(r"^\| `([a-z0-9-]+)`", page, re.MULTILINE)) == set(KINDS)


def test_checks_give_the_values_that_kinds_ask_for() -> None:
    """Where the code is written out and no text is given."""
    for file in Path(findings.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "finding"):
                continue
            code, names = call.args[0], {keyword.arg for keyword in call.keywords}
            if isinstance(code, ast.Constant) and not call.args[1:] and None not in names:
                wanted = {name for _, name, _, _ in Formatter().parse(KINDS[code.value].says)}
                assert names - {"cure", "severity", "about"} == wanted - {None}, ast.unparse(call)


def test_every_kind_is_found_by_a_check() -> None:
    package = Path(findings.__file__).parents[2]  # what a drafter is checked for stands beside it
    sources = [file.read_text(encoding="utf-8") for file in package.rglob("*.py")]
    assert set(KINDS) <= set(re.findall(r'"([a-z0-9-]+)"', "".join(sources)))


def test_the_findings_are_plain_text() -> None:
    items: list[Finding] = examine(TARGET, "paceline/tiny-draft")
    fields: list[Any] = [getattr(item, name) for item in items for name in ("text", "cure")]
    assert not [text for text in fields if "\n" in text or "torch." in text]
