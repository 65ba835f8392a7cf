"""Chat templates, end tokens, padding rows and tied heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.lab.doctor import examine
from support.doctor_folders import Copy, Folder, codes, only
from support.encoding_tokenizers import CHATML, INST, smollm, write_model

ABOUT_CHATS = {"chat-template-refuses", "turn-end-ignored"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ChatML model with 1,000 tokens and the same number of rows."""
    root = tmp_path_factory.mktemp("made")
    write_model(root / "chatml", smollm(1000))
    return root / "chatml"


@pytest.fixture
def chatml(made: Path, tmp_path: Path) -> Folder:
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return Folder(tmp_path)


def with_template(folder: Folder, template: str) -> str:
    (folder.path / "chat_template.jinja").write_text(template)
    return str(folder)


def test_a_sound_model_has_no_findings(chatml: Folder) -> None:
    assert not codes(examine(str(chatml))) & ABOUT_CHATS
    assert not codes(examine("paceline/tiny")) & ABOUT_CHATS


def test_a_template_without_markers_is_accepted(chatml: Folder) -> None:
    """Llama 2 writes [INST] in letters, and opens no answer: its template is in order."""
    assert not codes(examine(with_template(chatml, INST))) & ABOUT_CHATS


def test_a_template_that_refuses(chatml: Folder) -> None:
    finding = only(
        examine(with_template(chatml, "{{ raise_exception('no system message') }}")),
        "chat-template-refuses",
    )
    assert "no system message" in finding.text


def test_a_turn_end_that_is_no_end_token(chatml: Folder) -> None:
    """The base model's end token with the tuned one's template: answers run on."""
    for name in ("generation_config.json", "config.json"):
        chatml.json(name, eos_token_id=0)
    chatml.json("tokenizer_config.json", eos_token="<|endoftext|>")
    finding = only(examine(str(chatml)), "turn-end-ignored")
    assert "'<|im_end|>' (id 2)" in finding.text and "end tokens are [0]" in finding.text
    chatml.json("generation_config.json", eos_token_id=[0, 2])
    assert not codes(examine(str(chatml))) & ABOUT_CHATS


def padded(folder: Folder, row: torch.Tensor) -> Folder:
    """64 rows more than tokens, of these values; the others look trained."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name] * 3, row.expand(64, 32)])

    return folder.config(vocab_size=1064, initializer_range=0.02).tensors(change)


def test_a_padding_row_can_be_sampled_and_has_no_text(chatml: Folder) -> None:
    """The distribution is the model's own, and transformers would draw them, too."""
    llm = LLM(str(padded(chatml, torch.zeros(32))), draft="none", dtype="float32", draft_length=0)
    params = SamplingParams(max_tokens=200, temperature=100.0, seed=1, ignore_eos=True)
    finding = llm.generate("The quick", params)[0]
    assert any(token >= 1000 for token in finding.token_ids)
    before = llm.tokenizer.encode("The quick")
    backend = llm.tokenizer.backend_tokenizer
    assert "The quick" + finding.text == backend.decode(before + finding.token_ids)


def test_a_tied_model_stores_one_matrix(chatml: Folder) -> None:
    def drop(name: str) -> Folder:
        return chatml.tensors(lambda tensors: tensors.pop(name))

    chatml.config(tie_word_embeddings=True)
    drop("lm_head.weight")
    assert not codes(examine(str(chatml))) & {"tensors-refused", *ABOUT_CHATS}
    chatml.config(tie_word_embeddings=False)
    assert "lm_head.weight" in only(examine(str(chatml)), "tensors-refused").text


def test_end_tokens_and_template_of_a_draft_are_ignored(chatml: Folder, copy: Copy) -> None:
    for name in ("generation_config.json", "config.json"):
        chatml.json(name, eos_token_id=0)
    with_template(chatml, CHATML.replace("im_start", "begin"))
    findings = examine("paceline/tiny", str(chatml))
    assert not codes(findings, "draft") & ABOUT_CHATS


def test_an_unreadable_generation_config_is_ignored(chatml: Folder) -> None:
    (chatml.path / "generation_config.json").write_text("[1]")
    assert json.loads((chatml.path / "generation_config.json").read_text()) == [1]
    assert not codes(examine(str(chatml))) & ABOUT_CHATS
