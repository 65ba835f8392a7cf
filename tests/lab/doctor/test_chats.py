"""Chat templates, end tokens, padding rows and tied heads, as real folders get them wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.lab.doctor import Severity, examine
from support.doctor_folders import Copy, Folder, codes, only
from support.encoding_tokenizers import CHATML, INST, smollm, write_model

ABOUT_CHATS = {
    "chat-template-refuses",
    "chat-template-foreign",
    "chat-template-no-prompt",
    "turn-end-ignored",
    "end-tokens-differ",
    "end-token-ordinary",
    "tied-head-differs",
    "tied-head-repeated",
    "vocabulary-padded",
}


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


def test_a_template_of_another_model(chatml: Folder) -> None:
    other = CHATML.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
    finding = only(examine(with_template(chatml, other)), "chat-template-foreign")
    assert finding.severity is Severity.WARNING and finding.about == "target"
    assert "<start_of_turn>, <end_of_turn>" in finding.text and "tokens" in finding.text


def test_a_template_without_markers_is_accepted(chatml: Folder) -> None:
    """Llama 2 writes [INST] in letters, and opens no answer: its template is in order."""
    assert not codes(examine(with_template(chatml, INST))) & ABOUT_CHATS


def test_a_template_without_generation_prompt(chatml: Folder) -> None:
    deaf = CHATML.partition("{% if add_generation_prompt")[0]
    finding = only(examine(with_template(chatml, deaf)), "chat-template-no-prompt")
    assert "<|im_start|>assistant" in finding.text and "add_generation_prompt" in finding.cure


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
    assert "'<|im_end|>' (id 2)" in finding.text and "'<|endoftext|>' (0)" in finding.text
    chatml.json("generation_config.json", eos_token_id=[0, 2])
    assert not codes(examine(str(chatml))) & {"turn-end-ignored", "end-tokens-differ"}


def test_end_tokens_that_disagree(chatml: Folder) -> None:
    chatml.json("generation_config.json", eos_token_id=0)
    finding = only(examine(str(chatml)), "end-tokens-differ")
    assert finding.severity is Severity.WARNING
    assert "generation_config.json: '<|endoftext|>' (0)" in finding.text
    assert "the tokenizer: '<|im_end|>' (2)" in finding.text
    # Generation ends at the tokenizer's as well, so no turn runs on.
    assert "turn-end-ignored" not in codes(examine(str(chatml)))
    assert LLM(str(chatml), draft="none", dtype="float32", draft_length=0).end_tokens == {0, 2}
    chatml.json("generation_config.json", eos_token_id=2).config(eos_token_id=0)
    assert only(examine(str(chatml)), "end-tokens-differ").severity is Severity.NOTE
    (chatml.path / "generation_config.json").unlink()
    assert only(examine(str(chatml)), "end-tokens-differ").severity is Severity.WARNING


def test_an_end_token_that_is_a_word(chatml: Folder) -> None:
    chatml.json("generation_config.json", eos_token_id=[2, 300, 5000])
    finding = only(examine(str(chatml)), "end-token-ordinary")
    assert (
        "(300)" in finding.text and "id 5000" in finding.text and "'<|im_end|>'" not in finding.text
    )


def padded(folder: Folder, row: torch.Tensor) -> Folder:
    """64 rows more than tokens, of these values; the others look trained."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name] * 3, row.expand(64, 32)])

    return folder.config(vocab_size=1064, initializer_range=0.02).tensors(change)


def test_untrained_padding_rows(chatml: Folder) -> None:
    finding = only(examine(str(padded(chatml, torch.zeros(32)))), "vocabulary-padded")
    assert finding.severity is Severity.WARNING
    assert "1,064 rows for 1,000 ids: rows 1000 to 1063 are padding" in finding.text
    assert "their logits are 0 for every text" in finding.text
    assert "resize_token_embeddings" in finding.cure


def test_padding_rows_suppressed_by_training(chatml: Folder) -> None:
    finding = only(examine(str(padded(chatml, torch.full((32,), -0.4)))), "vocabulary-padded")
    assert finding.severity is Severity.NOTE


def test_a_padding_row_can_be_sampled_and_has_no_text(chatml: Folder) -> None:
    """As the finding says: the distribution is the model's own, and transformers would draw them,
    too."""
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
    assert not codes(examine(str(chatml))) & {"tensors-missing", *ABOUT_CHATS}
    chatml.config(tie_word_embeddings=False)
    finding = only(examine(str(chatml)), "tensors-missing")
    assert "lm_head.weight" in finding.text and "tie_word_embeddings" in finding.cure


def test_end_tokens_and_template_of_a_draft_are_ignored(chatml: Folder, copy: Copy) -> None:
    for name in ("generation_config.json", "config.json"):
        chatml.json(name, eos_token_id=0)
    with_template(chatml, CHATML.replace("im_start", "begin"))
    findings = examine("paceline/tiny", str(chatml))
    assert not codes(findings, "draft") & (ABOUT_CHATS - {"vocabulary-padded"})


def test_an_unreadable_generation_config_is_ignored(chatml: Folder) -> None:
    (chatml.path / "generation_config.json").write_text("[1]")
    assert json.loads((chatml.path / "generation_config.json").read_text()) == [1]
    assert "end-tokens-differ" not in codes(examine(str(chatml)))


def test_a_head_that_repeats_the_embedding(chatml: Folder) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    finding = only(examine(str(chatml.tensors(repeat))), "tied-head-repeated")
    assert finding.severity is Severity.NOTE and "tied: False" in finding.text


def test_an_untied_head_contradicts_the_config(chatml: Folder) -> None:
    text = "The quick brown fox"
    head = (
        LLM(str(chatml), draft="none", dtype="float32", draft_length=0).generate(text)[0].token_ids
    )
    chatml.config(tie_word_embeddings=True)
    finding = only(examine(str(chatml)), "tied-head-differs")
    assert finding.severity is Severity.WARNING and "another head" in finding.text
    # As the finding says: the file's own head is used.
    assert (
        LLM(str(chatml), draft="none", dtype="float32", draft_length=0).generate(text)[0].token_ids
        == head
    )
