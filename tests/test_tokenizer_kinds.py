"""Vocabularies of real kinds and sizes: streams, stop strings, grammars and drafts stay exact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from encoding_tokenizers import MAKERS, UNUSUAL, write_model, write_translation
from paceline import LLM, Completion, Grammar, SamplingParams
from paceline.draft.retokenise import Retokeniser
from paceline.draft.vocab import TokenTexts, shared_ids

# With more rows of logits than tokens, as heads often have: 49,216 and 200,064.
PADDING = {"smollm": 64, "wide": 64}
OTHERS = dict(zip(MAKERS, [*list(MAKERS)[2:], *list(MAKERS)[:2]], strict=True))
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind: 12 + 30 is 42."
ODD = f"Früh — {UNUSUAL}\n\n\tdef f(x):  return 'x'   # 🙂🙂"
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
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
    "regex": Grammar("regex", "(🙂|é|你 ?){12}x"),
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
        """The token of one byte."""
        spelt = texts(self.name)
        fallback = spelt.tokenizer.backend_tokenizer.token_to_id(f"<0x{byte:02X}>")
        return spelt.ids[bytes([byte])] if fallback is None else int(fallback)

    @property
    def prompts(self) -> list[str | list[int]]:
        """A text, a chat, odd characters, and one that is cut within a character."""
        chat = self.llm.render_chat([{"role": "user", "content": TEXT}])
        cut = [*self.llm.tokenizer.encode("It is "), self.byte(0xF0), self.byte(0x9F)]
        return [TEXT, chat, ODD, cut]


@pytest.fixture(scope="module", params=list(MAKERS))
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kind]:
    root = tmp_path_factory.mktemp(request.param)
    write_model(root / "target", made(request.param), padding=PADDING.get(request.param, 0))
    llm = LLM(str(root / "target"), dtype="float32", draft_length=0)
    yield Kind(request.param, llm, root)
    llm.close()


def torn(kind: Kind) -> SamplingParams:
    """Bytes of characters in any order: whole ones, halves and such as are no text."""
    likely = [kind.byte(byte) for byte in (*"🙂é你".encode(), 0xFF, *b" x\n")]
    bias = dict.fromkeys(likely, 60.0)
    return SamplingParams(max_tokens=40, temperature=1.0, seed=7, logit_bias=bias, ignore_eos=True)


def common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def streamed(llm: LLM, prompt: str | list[int], params: SamplingParams) -> tuple[str, Completion]:
    pieces, completion = [], None
    for event in llm.stream(prompt, params):
        pieces.append(event.text)
        completion = event.completion or completion
    assert completion is not None
    return "".join(pieces), completion


def test_a_text_comes_back(kind: Kind) -> None:
    """Or the rest of the tests would say little."""
    for text in (TEXT, ODD):
        assert kind.decode(kind.llm.tokenizer.encode(text)) == text
    assert texts(kind.name).reads_back(ODD)
    emoji = texts(kind.name).encode("x🙂")
    assert len(emoji) >= 3, "an emoji is cut across tokens"


@pytest.mark.parametrize("wish", ["greedy", "seeded", "torn"])
def test_streamed_text_is_the_text_at_the_end(kind: Kind, wish: str) -> None:
    params = {"greedy": GREEDY, "seeded": SEEDED, "torn": torn(kind)}[wish]
    drafting = kind.llm.beside("ngram:min=1", draft_length=4)
    for prompt in kind.prompts:
        pieces, found = streamed(kind.llm, prompt, params)
        assert pieces == found.text
        ids = kind.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        # A prompt that ends within a character shows its half; the answer may complete it.
        before, whole = kind.decode(ids), kind.decode(ids + found.token_ids)
        assert pieces == whole[common(before, whole) :]
        assert streamed(drafting, prompt, params)[0] == pieces
        assert kind.llm.generate(prompt, params)[0].text == pieces
    drafting.close()


def test_malformed_bytes_are_shown_as_such(kind: Kind) -> None:
    _, found = streamed(kind.llm, TEXT, torn(kind))
    assert "\ufffd" in found.text and found.text.strip("\ufffd x\né你")


def test_stop_strings_across_tokens(kind: Kind) -> None:
    drafting = kind.llm.beside("ngram:min=1", draft_length=4)
    whole = kind.llm.generate(TEXT, SEEDED)[0].text
    stops = [whole[at : at + 5] for at in range(3, len(whole) - 5, 23)]
    stops = [stop for stop in stops if "\ufffd" not in stop][:5]
    assert len(stops) > 2
    for stop in stops:
        params = SamplingParams(**{**vars(SEEDED), "stop": (stop,)})
        for llm in (kind.llm, drafting):
            pieces, found = streamed(llm, TEXT, params)
            assert pieces == found.text == whole[: whole.index(stop)]
            assert found.finish_reason == "stop"
    drafting.close()


def test_stop_strings_of_cut_characters(kind: Kind) -> None:
    params = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "grammar": GRAMMARS["regex"]}
    whole = kind.llm.generate(TEXT, SamplingParams(**params))[0].text
    for stop in {"🙂", "é你", "你", whole[2:5]} & {
        whole[i:j] for i in range(12) for j in range(13)
    }:
        pieces, found = streamed(kind.llm, TEXT, SamplingParams(**params, stop=(stop,)))
        assert pieces == found.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("draft", ["ngram:min=1", "suffix", "recycling", "model:{noisy}"])
def test_drafts_change_nothing(kind: Kind, draft: str) -> None:
    llm = kind.llm.beside(draft.format(noisy=kind.noisy), draft_length=4, max_batch_size=4)
    accepted = 0
    for params in (GREEDY, SEEDED, torn(kind)):
        expected = [c.token_ids for c in kind.llm.generate(kind.prompts, params)]
        found = llm.generate(kind.prompts, params)
        assert [c.token_ids for c in found] == expected
        accepted += sum(c.stats.accepted_tokens for c in found)
    assert accepted > 0
    llm.close()


def fits(name: str, text: str) -> bool:
    if name == "schema":
        person = json.loads(text)
        return set(person) == {"mood", "name", "age"} and person["mood"] in ("🙂", "größer", "你好")
    if name == "regex":
        return re.fullmatch("(🙂|é|你 ?){12}x", text) is not None
    return text in (" yes", " no, never", "👩‍👧", "größer")


@pytest.mark.parametrize("draft", ["ngram:min=1", "suffix", "model:{noisy}", "model:{other}"])
def test_grammars_with_drafts(kind: Kind, draft: str) -> None:
    llm = kind.llm.beside(draft.format(noisy=kind.noisy, other=kind.other), draft_length=4)
    for name, grammar in GRAMMARS.items():
        for sampled in ({}, {"temperature": 1.0, "seed": 9}):
            params = SamplingParams(max_tokens=90, grammar=grammar, **sampled)
            expected = kind.llm.generate(TEXT, params)[0]
            pieces, found = streamed(llm, TEXT, params)
            assert found.token_ids == expected.token_ids
            assert pieces == found.text == expected.text
            assert found.finish_reason == "stop" and fits(name, found.text), found.text
    llm.close()


@pytest.mark.parametrize("way", ["intersection", "string"])
def test_a_draft_of_another_kind(kind: Kind, way: str) -> None:
    llm = kind.llm.beside(f"model:{kind.other},vocab={way}", draft_length=4)
    assert llm.draft_vocabulary is not None
    drafted = accepted = 0
    for params in (GREEDY, SEEDED, torn(kind)):
        expected = [c.token_ids for c in kind.llm.generate(kind.prompts, params)]
        found = llm.generate(kind.prompts, params)
        assert [c.token_ids for c in found] == expected
        drafted += sum(c.stats.drafted_tokens for c in found)
        accepted += sum(c.stats.accepted_tokens for c in found)
    assert drafted > 0
    assert accepted > 0 or way == "string"
    llm.close()


@pytest.mark.parametrize("other", MAKERS)
@pytest.mark.parametrize("name", MAKERS)
def test_text_is_carried_into_another_vocabulary(name: str, other: str) -> None:
    ours, theirs = texts(name), texts(other)
    pairs = shared_ids(ours, theirs)
    for text in (TEXT, ODD):
        carried = Retokeniser(ours, theirs, pairs)
        ids = ours.encode(text)
        for end in range(1, len(ids) + 1):
            carried.extend(ids[:end])
        skipped = [token for token in carried.context() if token not in theirs.special]
        # A blank in front of the first word is the tokenizers' own.
        assert theirs.spelt(skipped).decode().lstrip(" ") == text
    carried = Retokeniser(ours, theirs, pairs)
    carried.extend(ours.encode("The quick brown"))
    drafted = theirs.after("The quick brown", " fox jumps 🙂 over")
    wanted = ours.after("The quick brown", " fox jumps 🙂 over")
    assert drafted is not None and wanted is not None
    assert carried.proposal(drafted) == wanted[: len(carried.proposal(drafted))] != []
