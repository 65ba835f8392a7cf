"""Vocabularies of real kinds and sizes: streams, stop strings, grammars and drafts stay exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, Completion, Grammar, SamplingParams
from paceline.draft.vocabulary import TokenTexts
from support.encoding_tokenizers import MAKERS, UNUSUAL, write_model, write_translation

# With more rows of logits than tokens, as heads often have: 49,216 and 128,064.
PADDING = {"smollm": 64, "wide": 64}
# Byte-level and with byte fallback: the two ways that a draft's text is read back.
TRANSLATED = ("smollm", "llama2")
KINDS = [
    pytest.param(name, marks=() if name in TRANSLATED else pytest.mark.slow) for name in MAKERS
]
OTHERS = dict(zip(MAKERS, [*list(MAKERS)[2:], *list(MAKERS)[:2]], strict=True))
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind: 12 + 30 is 42."
ODD = f"Früh — {UNUSUAL}\n\n\tdef f(x):  return 'x'   # 🙂🙂"
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["🙂", "größer", "你好"]},
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["mood", "name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json(SCHEMA),
    "regex": Grammar("regex", "(🙂|é|你 ?){8}x"),
    "choice": Grammar("lark", 'start: " yes" | " no, never" | "👩‍👧" | "größer"'),
}


@lru_cache
def made(name: str) -> Any:
    return MAKERS[name]()


@lru_cache
def texts(name: str) -> TokenTexts:
    return TokenTexts(made(name))


@dataclass(frozen=True)
class Kind:
    """A random model with a tokenizer of one kind; ``noisy`` is the model with noise."""

    name: str
    llm: LLM
    root: Path
    answers: dict[str, list[Completion]] = field(default_factory=dict)

    @property
    def noisy(self) -> str:
        folder = self.root / "noisy"
        if not folder.exists():
            write_model(folder, made(self.name), padding=PADDING.get(self.name, 0), noise=0.1)
        return str(folder)

    @property
    def other(self) -> str:
        """The model in the vocabulary of another kind."""
        folder = self.root / "other"
        if not folder.exists():
            write_translation(folder, str(self.root / "target"), made(OTHERS[self.name]))
        return str(folder)

    def decode(self, ids: list[int]) -> str:
        return str(self.llm.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))

    def byte(self, byte: int) -> int:
        """The token of one byte; of a letter the ordinary one."""
        return texts(self.name).ids[bytes([byte])]

    @property
    def prompts(self) -> list[str | list[int]]:
        """A text, a chat, odd characters, and one that is cut within a character."""
        chat = self.llm.render_chat([{"role": "user", "content": TEXT}])
        cut = [*self.llm.tokenizer.encode("It is "), self.byte(0xF0), self.byte(0x9F)]
        return [TEXT, chat, ODD, cut]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """Each is made once, in whatever order the tests ask for them."""

    @lru_cache
    def kind_of(name: str) -> Kind:
        root = tmp_path_factory.mktemp(name)
        write_model(root / "target", made(name), padding=PADDING.get(name, 0))
        llm = LLM(str(root / "target"), draft="none", dtype="float32", draft_length=0)
        return Kind(name, llm, root)

    return kind_of


@pytest.fixture(params=list(MAKERS))
def kind(request: pytest.FixtureRequest, kinds: Callable[[str], Kind]) -> Kind:
    return kinds(request.param)


def torn(kind: Kind) -> SamplingParams:
    """Bytes of characters in any order: whole ones, halves and such as are no text."""
    likely = [kind.byte(byte) for byte in (*"🙂é你".encode(), 0xFF, *b" x\n")]
    # With byte fallback a run of bytes is text as a whole or not at all: some whole letters, too.
    whole = (texts(kind.name).ids.get(letter.encode()) for letter in "é你")
    bias = dict.fromkeys([*likely, *(token for token in whole if token is not None)], 60.0)
    return SamplingParams(max_tokens=16, temperature=1.0, seed=7, logit_bias=bias, ignore_eos=True)


def common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def streamed(
    llm: LLM, prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams]
) -> list[Completion]:
    """What each prompt got, all in one batch; the pieces of every text are the text at the end."""
    pieces = [""] * len(prompts)
    done: dict[int, Completion] = {}
    for event in llm.stream(prompts, params):
        pieces[event.request] += event.text
        if event.completion is not None:
            done[event.request] = event.completion
    found = [done[number] for number in range(len(prompts))]
    assert [completion.text for completion in found] == pieces
    return found


def params_list(kind: Kind) -> dict[str, SamplingParams]:
    return {"greedy": GREEDY, "seeded": SEEDED, "torn": torn(kind)}


def plainly(kind: Kind, asked: str) -> list[Completion]:
    """Plain answers to all prompts, made once."""
    if asked not in kind.answers:
        kind.answers[asked] = kind.llm.generate(kind.prompts, params_list(kind)[asked])
    return kind.answers[asked]


def same_tokens(kind: Kind, llm: LLM, *names: str) -> int:
    """A drafting LLM gives the plain answers, streamed; the tokens that its drafts saved."""
    accepted = 0
    for name in names:
        expected = plainly(kind, name)
        found = streamed(llm, kind.prompts, params_list(kind)[name])
        assert [c.token_ids for c in found] == [c.token_ids for c in expected], name
        assert [c.text for c in found] == [c.text for c in expected], name
        accepted += sum(c.stats.accepted_tokens for c in found)
    return accepted


def test_a_text_comes_back(kind: Kind) -> None:
    """Or the rest of the tests would say little."""
    for text in (TEXT, ODD):
        assert kind.decode(kind.llm.tokenizer.encode(text)) == text
    emoji = kind.llm.tokenizer.encode("x🙂", add_special_tokens=False)
    assert len(emoji) >= 3, "an emoji is cut across tokens"


@pytest.mark.parametrize("asked", ["greedy", "seeded", "torn"])
def test_streamed_text_is_the_text_at_the_end(kind: Kind, asked: str) -> None:
    expected = plainly(kind, asked)
    found = streamed(kind.llm, kind.prompts, params_list(kind)[asked])
    for prompt, ours, theirs in zip(kind.prompts, found, expected, strict=True):
        assert ours.text == theirs.text and ours.token_ids == theirs.token_ids
        ids = kind.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        # A prompt that ends within a character shows its half; the answer may complete it.
        before, whole = kind.decode(ids), kind.decode(ids + ours.token_ids)
        assert ours.text == whole[common(before, whole) :]


def test_malformed_bytes_are_shown_as_such(kind: Kind) -> None:
    found = "".join(completion.text for completion in plainly(kind, "torn"))
    assert "\ufffd" in found and found.strip("\ufffd x\n")


def test_stop_strings_across_tokens(kind: Kind) -> None:
    whole = plainly(kind, "seeded")[0].text
    stops = [whole[at : at + 5] for at in range(3, len(whole) - 5, 11)]
    stops = [stop for stop in stops if "\ufffd" not in stop][:6]
    assert len(stops) > 2
    params = [replace(SEEDED, stop=(stop,)) for stop in stops]
    drafting = kind.llm.with_draft("ngram:min=1", draft_length=4)
    for llm in (kind.llm, drafting):
        for stop, found in zip(stops, streamed(llm, [TEXT] * len(stops), params), strict=True):
            assert found.text == whole[: whole.index(stop)]
            assert found.finish_reason == "stop"
    drafting.close()


def test_stop_strings_of_cut_characters(kind: Kind) -> None:
    """The grammar writes nothing else, so that the characters come whatever the model."""
    asked = SamplingParams(max_tokens=60, temperature=1.0, seed=5, grammar=GRAMMARS["regex"])
    whole = kind.llm.generate(TEXT, asked)[0].text
    stops = [stop for stop in ("🙂", "é", "你", whole[2:5]) if stop in whole]
    assert len(stops) > 1
    params = [replace(asked, stop=(stop,)) for stop in stops]
    found = streamed(kind.llm, [TEXT] * len(stops), params)
    assert [c.text for c in found] == [whole[: whole.index(stop)] for stop in stops]


def test_drafts_change_nothing(kind: Kind) -> None:
    """Every kind with one of the two that look text up."""
    draft = ("ngram:min=1", "suffix")[list(MAKERS).index(kind.name) % 2]
    llm = kind.llm.with_draft(draft, draft_length=4, max_batch_size=4)
    assert same_tokens(kind, llm, *params_list(kind)) > 0
    llm.close()


@pytest.mark.parametrize("kind", TRANSLATED, indirect=True)
def test_a_draft_of_the_same_kind(kind: Kind) -> None:
    """With more rows of logits than tokens, and with as many."""
    llm = kind.llm.with_draft(f"model:{kind.noisy}", draft_length=4, max_batch_size=4)
    assert same_tokens(kind, llm, "greedy") > 0
    llm.close()


def fits(name: str, text: str) -> bool:
    if name == "schema":
        person = json.loads(text)
        return set(person) == {"mood", "name", "age"} and person["mood"] in ("🙂", "größer", "你好")
    if name == "regex":
        return re.fullmatch("(🙂|é|你 ?){8}x", text) is not None
    return text in (" yes", " no, never", "👩‍👧", "größer")


CONSTRAINED = {
    (name, seed): SamplingParams(
        max_tokens=90, grammar=grammar, temperature=0.0 if seed is None else 1.0, seed=seed
    )
    for name, grammar in GRAMMARS.items()
    for seed in (None, 9)
}


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_grammars_with_drafts(kind: Kind) -> None:
    prompts: list[str | list[int]] = [TEXT] * len(CONSTRAINED)
    expected = kind.llm.generate(prompts, list(CONSTRAINED.values()))
    translated = ["model:{other}"] if kind.name in TRANSLATED else []
    for draft in ["ngram:min=1", *translated]:
        llm = kind.llm.with_draft(draft.format(other=kind.other), draft_length=4)
        found = streamed(llm, prompts, list(CONSTRAINED.values()))
        for (name, _), ours, theirs in zip(CONSTRAINED, found, expected, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
            assert ours.finish_reason == "stop" and fits(name, ours.text), ours.text
        llm.close()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_draft_of_another_kind(kind: Kind) -> None:
    llm = kind.llm.with_draft(f"model:{kind.other}", draft_length=4)
    assert llm.draft_vocabulary is not None
    assert same_tokens(kind, llm, "greedy", "torn") > 0
    llm.close()
