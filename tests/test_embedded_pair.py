"""The weights inside the package: their size, their family likeness, and what they can do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.core.params import SamplingParams
from paceline.llm import LLM
from paceline.model.names import EMBEDDED, built_in, resolve

QUESTIONS = [
    "Tom has 14 apples and buys 23 more. How many apples does Tom have?",
    "A box holds 6 pencils. How many pencils are in 7 boxes?",
    "What are the next two numbers in the sequence 12, 15, 18, 21?",
]
PAIR = ("paceline/tiny", "paceline/tiny-draft")
STORY = "Once upon a time, there was a little girl named Lily. She loved to play with"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM("paceline/tiny", "paceline/tiny-draft", draft_length=4, dtype="float32")
    yield engine
    engine.close()


BUILT_IN = [name for name in built_in() if name.startswith(EMBEDDED)]


def sizes() -> dict[str, int]:
    """Bytes of weights by name, of which every floating-point tensor is in bf16."""
    found: dict[str, int] = {}
    for name in BUILT_IN:
        (file,) = Path(resolve(name)).glob("*.safetensors")
        found[name] = file.stat().st_size
        with safe_open(file, "pt") as tensors:
            kinds = {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
        assert kinds - {"I64", "BOOL"} == {"BF16"}  # EAGLE-3 has a map of its vocabulary
    return found


def test_weights_are_small_and_in_bf16() -> None:
    heads = {name: size for name, size in sizes().items() if name not in PAIR}
    assert sum(sizes()[name] for name in PAIR) <= 32e6
    blocks = [heads.pop(name) for name in ("paceline/tiny-dflash", "paceline/tiny-dspark")]
    assert sum(blocks) <= 5.2e6
    assert len(heads) == 3
    assert sum(heads.values()) <= 8e6


def test_shapes_are_those_that_were_asked_for(llm: LLM) -> None:
    target = llm.target
    with safe_open(Path(resolve("paceline/tiny")) / "model.safetensors", "pt") as tensors:
        parameters = sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118
    assert 12 <= target.num_layers <= 20
    assert 10e6 <= parameters <= 15e6
    draft = llm.engine.drafter.model  # type: ignore[attr-defined]
    assert draft.num_layers in (1, 2)
    assert torch.equal(torch.tensor(sorted(llm.tokenizer.get_vocab().values())), torch.arange(4096))


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("medusa:paceline/tiny-medusa", 1.8),
        ("eagle:paceline/tiny-eagle", 2.0),
        ("eagle2:paceline/tiny-eagle", 2.3),
        ("eagle3:paceline/tiny-eagle3", 3.0),
    ],
)
def test_heads_are_right_about_as_often_as_their_cards_say(
    llm: LLM, spec: str, least: float
) -> None:
    """A guard against broken weights; cards and benchmarks have the figures on more text."""
    heads = LLM("paceline/tiny", spec, draft_length=4, dtype="float32")
    prompts: list[list[int]] = [
        llm.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    done = heads.generate([*prompts, llm.tokenizer.encode(STORY)], SamplingParams(max_tokens=60))
    tokens = sum(len(completion.token_ids) for completion in done)
    steps = sum(completion.stats.target_steps for completion in done)
    assert tokens / steps > least


def test_each_has_a_model_card() -> None:
    for name in BUILT_IN:
        card = (Path(resolve(name)) / "README.md").read_text(encoding="utf-8")
        for word in ("Data", "licence", "Training", "Losses"):
            assert word in card
        assert "CC-BY-SA" not in card.split("left out")[0]


def test_stories_are_sentences(llm: LLM) -> None:
    (completion,) = llm.generate(STORY, SamplingParams(max_tokens=100))
    sentences = re.findall(r"[A-Z][a-z]+ [^.!?]+[.!?]", completion.text)
    assert len(sentences) >= 4
    words = re.findall(r"[a-z]+", completion.text.lower())
    assert len(words) > 40
    common = {"the", "and", "to", "a", "she", "was", "it", "her", "lily", "said", "they", "in"}
    assert sum(word in common for word in words) / len(words) > 0.25


def test_arithmetic_has_the_right_form(llm: LLM) -> None:
    for question in QUESTIONS:
        (answer,) = llm.chat([{"role": "user", "content": question}], SamplingParams())
        assert re.search(r"\d+ [-+*/] \d+ = \d+", answer.text), answer.text
        assert re.search(r"The answer is .+\.$", answer.text), answer.text
        assert answer.finish_reason == "stop"


def test_the_draft_is_mostly_right(llm: LLM) -> None:
    """A guard against broken weights; the figures by suite are in its README."""
    drafted = accepted = 0
    prompts = [STORY, "def add(a, b):\n", "One day, a big dog"]
    prompts += [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    for completion in llm.generate(prompts, SamplingParams(max_tokens=100, ignore_eos=True)):
        drafted += completion.stats.drafted_tokens
        accepted += completion.stats.accepted_tokens
    assert accepted / drafted > 0.4
