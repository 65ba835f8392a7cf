"""GGUF files: read as transformers reads them, or refused by name in one line."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline import LLM, ModelLoadError, SamplingParams, UnsupportedModelError
from paceline.cli.main import app
from paceline.model.gguf import gguf_file, read_gguf
from paceline.model.loading import load_module, load_tokenizer
from support.made_gguf import (
    ARCHITECTURES,
    CONTEXT,
    skip_where_scores_are_needed,
    write_gguf,
)

pytest.importorskip("gguf")

PROMPT = [5, 40, 80, 200, 17, 33]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(path)
    return path


def theirs(path: Path, tokens: int) -> list[int]:
    """What transformers' own generate says, from the same file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return generated(model, tokens)


def generated(model: Any, tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in output[0][len(PROMPT) :]]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_text_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    skip_where_scores_are_needed(architecture)
    path = tmp_path / "model.gguf"
    module = write_gguf(path, architecture)
    llm = LLM(str(path), draft="ngram", dtype="float32")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (ours,) = llm.generate([PROMPT], params)
    assert ours.token_ids == generated(module, 24)
    # And the weights are those that were written: the file is read right by both.
    read = load_module(str(path), "float32", "cpu").state_dict()
    for name, values in module.state_dict().items():
        assert torch.allclose(read[name], values, atol=1e-6), name


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantisations(quantisation: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation=quantisation)
    (ours,) = LLM(str(path), draft="none", dtype="float32", quantize="none").generate(
        [PROMPT], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    assert ours.token_ids == theirs(path, 12)
    assert read_gguf(path).quantised == ((quantisation,) if quantisation[0] == "Q" else ())


def test_what_is_in_the_file_is_taken(llama: Path) -> None:
    """Tokenizer, chat template, end tokens (of a text and of a turn) and context."""
    llm = LLM(str(llama), draft="none", dtype="float32")
    assert llm.context_budget.positions == CONTEXT
    assert llm.end_tokens == {2, 3}
    ids = llm.render_chat([{"role": "user", "content": "the in"}])
    assert llm.tokenizer.decode(ids) == "<s>the in</s>"
    assert llm.tokenizer.tokenize("the") == ["the"]
    # transformers adds <|endoftext|>, for which the model has no row.
    assert len(llm.tokenizer) == llm.target.vocab_size
    assert not hasattr(llm.target.hf.config, "quantization_config")
    llm.target.hf.save_pretrained(llama.parent / "saved")  # which transformers refuses otherwise


def test_a_folder_with_one(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama, tmp_path / "some.gguf")
    assert gguf_file(str(tmp_path)) == tmp_path / "some.gguf"
    target, draft = str(llama), f"model:{tmp_path}"
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (fast,) = LLM(target, draft=draft, dtype="float32", draft_length=3).generate([PROMPT], params)
    (plain,) = LLM(str(tmp_path), draft="none", dtype="float32").generate([PROMPT], params)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.acceptance_rate == 1.0  # the draft is the target
    shutil.copy(llama, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files; name one"):
        LLM(str(tmp_path), draft="none")


def test_numbers_by_default(llama: Path, tmp_path: Path) -> None:
    """Where the checkpoint's own dtype is asked for: bf16, unless all of it is float32."""
    gguf = tmp_path / "packed.gguf"
    write_gguf(gguf, quantisation="Q8_0")
    from paceline.model import loading

    assert loading._load_gguf("x", gguf, None, None).dtype == torch.bfloat16
    assert loading._load_gguf("x", llama, None, None).dtype == torch.float32


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["a", "ĊĊ", "1", "2"]), ("gpt-2", None)])
def test_how_text_is_split(pre: str, tokens: list[str] | None, tmp_path: Path) -> None:
    """Vocabularies that part digits first, which transformers does not know of itself."""
    path = tmp_path / "model.gguf"
    write_gguf(path, pre=pre)
    assert load_tokenizer(str(path)).tokenize("a\n\n12") == (tokens or ["a", "Ċ", "Ċ", "1", "2"])


# -- refused -----------------------------------------------------------------------------------


def refused(path: Path | str) -> str:
    """The one line that every way to load it gives."""
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        LLM(str(path), draft="none")
    (line,) = str(caught.value).splitlines()
    return line


def other_architecture(writer: Any, name: str = "grok") -> None:
    writer.kv_data[0]["general.architecture"].value = name


def one_part(writer: Any) -> None:
    writer.add_uint16("split.count", 3)


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=other_architecture)
    line = refused(path)
    assert "architecture grok" in line and "llama" in line and "qwen3" in line
    write_gguf(path, change=partial(other_architecture, name="qwen3moe"))  # transformers reads it
    assert "architecture qwen3moe, which is not read here" in refused(path)


def test_state_space_models(tmp_path: Path) -> None:
    """Read by transformers, but not by us: their state cannot be rolled back."""
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_vocab_size(32)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(32)
    writer.add_ssm_state_size(8)
    writer.add_ssm_time_step_rank(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(32, 16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "mamba has" in refused(path) and "rolled back" in refused(path)


def test_a_quantisation_that_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the package names but cannot unpack, and one that it does not know at all."""
    import gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, quantisation="Q8_0")

    def unable(data: Any, kind: Any) -> Any:
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "dequantize", unable)
        assert "in a quantisation that is not read" in refused(path)
    name = b"token_embd.weight"
    content = bytearray(path.read_bytes())
    place = content.index(name) + len(name) + 4 + 2 * 8  # after the number and size of dimensions
    content[place : place + 4] = (99).to_bytes(4, "little")
    path.write_bytes(content)
    assert "quantisation type number 99" in refused(path)


def test_one_of_several_parts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=one_part)
    assert "one of 3 parts" in refused(path) and "merge" in refused(path)


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def drop(writer: Any) -> None:
        del writer.tensors[0]["blk.1.ffn_up.weight"]

    write_gguf(path, change=drop)
    assert "lacks the weight model.layers.1.mlp.up_proj.weight" in refused(path)


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.99])
def test_cut_short(kept: float, llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: int(len(content) * kept)])
    assert "damaged, cut short or no GGUF at all; download" in refused(path)


@pytest.mark.parametrize("place", [4, 8, 16, 24, 40])
def test_damaged_headers(place: int, llama: Path, tmp_path: Path) -> None:
    content = bytearray(llama.read_bytes())
    content[place : place + 4] = b"\xff\xff\xff\x7f"
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in refused(path)


def test_an_array_longer_than_the_file(llama: Path, tmp_path: Path) -> None:
    content = bytearray(llama.read_bytes())
    key = b"tokenizer.ggml.token_type"
    length = content.index(key) + len(key) + 8  # behind the types of the value and of its entries
    content[length - 4 : length + 8] = bytes(4) + (1 << 40).to_bytes(8, "little")  # of bytes
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "damaged, cut short or no GGUF at all; download" in refused(path)


def test_no_gguf_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>")
    assert "cut short or no GGUF at all" in refused(path)
    assert "does not exist; check the path" in refused(tmp_path / "modl.gguf")
    assert "does not exist; check the path" in refused("nowhere.gguf")


def test_without_the_extra(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = refused(llama)
    assert "the package gguf is needed" in line and "pip install 'paceline[gguf]'" in line


# -- commands ----------------------------------------------------------------------------------


def test_generate(llama: Path) -> None:
    arguments = ["generate", "the in", "--model", str(llama), "--max-tokens", "4", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--draft", "ngram"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"]


def findings(path: Path, *arguments: str) -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--model", str(path), "--json", *arguments])
    assert result.exit_code == 0, result.output
    return {item["code"]: item for item in json.loads(result.stdout)["findings"]}


def test_doctor_says_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    module = write_gguf(path, quantisation="Q4_1", pre="smollm")
    kept = findings(path, "--dtype", "float32")
    assert "Q4_1 are kept in that format" in kept["gguf-kept"]["found"]
    report = findings(path, "--dtype", "float32", "--backend", "reference")
    said = report["gguf-dequantised"]["found"]
    count = sum(parameter.numel() for parameter in module.parameters())
    assert "Q4_1" in said and f"{count * 4 / 1024:.1f} KiB in float32" in said
    assert "memory-fits" in report and "architecture-supported" in report
    assert not {"weights-absent", "tokenizer-absent", "gguf-tokenizer-unsure"} & report.keys()


def test_doctor_says_how_text_is_split(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, pre="some-new-split")
    report = findings(path)
    assert report["gguf-tokenizer-unsure"]["severity"] == "warning"
    assert "some-new-split" in report["gguf-tokenizer-unsure"]["found"]


@pytest.mark.parametrize("what", ["llama.logit_scale", "blk.0.attn_q.bias"])
def test_doctor_names_what_is_not_read(what: str, tmp_path: Path) -> None:
    """A key of the metadata, and a tensor that no weight takes: before anything is loaded."""
    path = tmp_path / "model.gguf"

    def change(writer: Any) -> None:
        if what.endswith("scale"):
            writer.add_logit_scale(0.5)
        else:
            writer.add_tensor(what, torch.ones(64).numpy())

    write_gguf(path, change=change)
    result = CliRunner().invoke(app, ["doctor", "--model", str(path), "--json"])
    # Older versions of transformers do not know how the file splits text either: a warning.
    found = json.loads(result.stdout)["findings"]
    (finding,) = [item for item in found if item["severity"] == "error"]
    assert result.exit_code == 1 and finding["code"] == "architecture-refused"
    assert what in finding["found"] and "folder" in finding["cure"]


def test_doctor_refuses_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=other_architecture)
    result = CliRunner().invoke(app, ["doctor", "--model", str(path)])
    assert result.exit_code == 1 and "architecture grok" in result.stderr
    assert len(result.stderr.splitlines()) == 1
