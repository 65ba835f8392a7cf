"""Vocabularies, special tokens and templates that differ, and rows of logits without tokens."""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.lab.doctor import Severity, examine
from support.doctor_folders import Copy, Folder, codes, only
from support.tiny_models import TinyPair

TARGET = "paceline/tiny"


def swap(said: Any, a: str, b: str) -> None:
    vocab = said["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def test_swapped_tokens_are_reported(copy: Copy) -> None:
    vocab = json.loads((copy("tiny").path / "tokenizer.json").read_text())["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.__getitem__)[-2:]
    folder = copy("tiny-draft").tokenizer(lambda said: swap(said, one, other))
    finding = only(examine(TARGET, str(folder)), "vocabulary-differs")
    assert (finding.severity, finding.about) == (Severity.WARNING, "pair")
    assert "2 of 4096" in finding.text and "id 4094" in finding.text
    assert "only these are drafted" in finding.text


def test_another_vocabulary(tiny_pair: TinyPair) -> None:
    findings = examine(tiny_pair.target, tiny_pair.foreign)
    assert {"vocabulary-differs", "vocabulary-refused"} & codes(findings, "pair")
    assert "vocabulary-same" not in {item.code for item in findings}


def test_a_draft_with_fewer_rows_than_the_target(copy: Copy) -> None:
    folder = rows(copy("tiny-draft"), 4000)
    findings = examine(TARGET, str(folder))
    assert only(findings, "vocabulary-refused").severity is Severity.ERROR
    finding = only(findings, "vocabulary-overflows")
    assert (finding.severity, finding.about) == (Severity.ERROR, "draft")
    assert "4095" in finding.text and "4,000" in finding.text


def rows(folder: Folder, count: int) -> Folder:
    """Cut or pad the embedding to this number of rows."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors["model.embed_tokens.weight"]
        new = torch.zeros(count, old.shape[1], dtype=old.dtype)
        new[: min(count, len(old))] = old[:count]
        tensors["model.embed_tokens.weight"] = new

    return folder.config(vocab_size=count).tensors(change)


def test_padding_rows_are_in_order(copy: Copy) -> None:
    findings = examine(TARGET, str(rows(copy("tiny-draft"), 4160)))
    assert only(findings, "vocabulary-same").severity is Severity.OK
    assert not codes(findings, "draft", "pair")


def test_no_chat_template(copy: Copy) -> None:
    folder = copy("tiny-draft")
    (folder.path / "chat_template.jinja").unlink()
    assert "chat-template-absent" in codes(examine(str(folder)), "target")


def test_no_tokenizer(copy: Copy) -> None:
    folder = copy("tiny-draft")
    for file in folder.path.glob("tok*"):
        file.unlink()
    findings = examine(TARGET, str(folder))
    assert only(findings, "tokenizer-absent").severity is Severity.NOTE
    assert only(findings, "vocabulary-same").about == "pair"
    assert only(examine(str(folder)), "tokenizer-absent").severity is Severity.ERROR
    (folder.path / "tokenizer.json").write_text("{")
    assert only(examine(TARGET, str(folder)), "tokenizer-absent").severity is Severity.ERROR
