"""The laws on one drafter, over a small target: what ``paceline check-drafter`` runs.

A drafter may propose anything, but what it proposes must be well-formed, drawn from the
distribution that it names, and independent of what it has forgotten."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from paceline.core.params import Grammar, SamplingParams
from paceline.draft.base import with_members
from paceline.drafters import BLOCK_SIZE, DRAFTERS, DraftLike, DraftSpec
from paceline.engine.recovery import Failure
from paceline.errors import ConfigError
from paceline.lab.certify.chisquare import homogeneity
from paceline.llm import LLM
from paceline.model.paged.cache import bytes_per_token

_PROMPTS = (
    "7 + 5 = 12, 7 + 6 = 13, 7 + 7 =",
    "Once upon a time there was a little girl named Lily. Once upon a time there was a",
    "The dog said: the cat said: the dog said: the",
    "a b c d e f g a b c d e f g a b",
)
_GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
_WAYS = {
    "greedy text": _GREEDY,
    "seeded text": SamplingParams(max_tokens=32, temperature=0.9, top_p=0.95, seed=3),
    "text under penalties": SamplingParams(max_tokens=32, repetition_penalty=1.3, min_tokens=8),
    "text of a grammar": SamplingParams(max_tokens=32, grammar=Grammar("regex", "[a-z 0-9+=,]+")),
}
_ALPHA = 5e-4  # per prompt: probability that a correct drafter fails the distribution test
_ANSWERS = 400  # per prompt


@dataclass(frozen=True)
class Law:
    """A law and its outcome: how it is ``broken`` ("" if it holds), and the ``error`` raised."""

    drafter: str
    name: str
    broken: str = ""
    error: Exception | None = None


Check = Callable[[LLM, Callable[[], DraftLike]], Iterator[str]]  # yields how a law is broken


def drafters_of(name: str, model: str) -> dict[str, Callable[[], DraftLike]]:
    """The drafters that ``module:NAME`` stands for, by name, as functions that create them. NAME is
    a DraftSpec (its examples are tested), a drafter's class, or a function that returns a drafter.
    A draft spec of a known kind stands for itself. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if module in DRAFTERS:
        return {name: lambda: name}
    sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{name!r} cannot be imported ({error}); give module:Class, seen from this folder"
        ) from error
    finally:
        sys.path.pop(0)
    if isinstance(made, type) and issubclass(made, DraftSpec):
        names = {record.weights: f"{model}-{record.weights}" for record in DRAFTERS.values()}
        texts = [example.format(target=model, **names) for example in made.examples]
        return {
            text: partial(made.read, text.partition(":")[2], {**DRAFTERS, made.kind: made})
            for text in texts
        }
    if not callable(made):
        raise ConfigError(f"{name!r} is no class and no function; name one that makes a drafter")
    needed = [p.name for p in signature(made).parameters.values() if p.default is p.empty]
    if needed:
        raise ConfigError(f"{name!r} needs {', '.join(needed)}; name a function without parameters")
    return {name: made}


def laws(drafter: str, make: Callable[[], DraftLike], model: str) -> Iterator[Law]:
    """Check each law; ``make`` creates a drafter. Raises what loading model and drafter raises."""
    plain = LLM(model, draft=None, max_batch_size=4, seed=1)
    plain.with_draft(make()).close()  # loading errors are raised here
    checks: dict[str, Check] = {
        "members": _drafter_attributes,
        **{way: partial(_texts, params) for way, params in _WAYS.items()},
        "text under preemption": _preempted,
        "distribution": _distribution,
        "something is proposed": _proposes,
    }
    for name, check in checks.items():
        try:
            yield Law(drafter, name, next(check(plain, make), ""))
        except Exception as error:  # from the drafter, or from the checks of strict mode
            yield Law(drafter, name, str(Failure.of(error)), error)


def _drafter_attributes(plain: LLM, make: Callable[[], DraftLike]) -> Iterator[str]:
    drafter = plain.with_draft(make(), strict=True).engine.drafter
    for length in range(9):
        for method in (drafter.max_nodes, drafter.passes):
            count = method(length)
            if not isinstance(count, int) or count < 0:
                yield f"{method.__name__}({length}) is {count!r}; give a number"
    if drafter.max_nodes(8) < 1:
        yield "max_nodes(8) is 0: there is no room for a draft"
    bad = [layer for layer in drafter.features if not 0 <= layer <= plain.target.num_layers]
    if bad:
        yield f"features {bad}: the target has layers 0 to {plain.target.num_layers}"
    for batch in (1, 4):
        drafter.warm_up(batch)


def _texts(params: SamplingParams, plain: LLM, make: Callable[[], DraftLike]) -> Iterator[str]:
    """Texts equal plain decoding's, in a batch, with each draft length."""
    expected = [done.token_ids for done in plain.generate(_PROMPTS, params)]
    for length in (1, 3, "auto"):
        llm = plain.with_draft(make(), strict=True, draft_length=length)
        prompts = _PROMPTS * 2
        for _ in range(2):  # twice: forgotten sequences must not influence later ones
            for done, wanted in zip(llm.generate(prompts, params), expected * 2, strict=True):
                if done.token_ids != wanted:
                    where = f"draft length {length}, prompt {done.prompt!r}"
                    yield f"{where}: the text is not plain decoding's"
        yield from _left_over(llm)


def _left_over(llm: LLM) -> Iterator[str]:
    """No cache block and no drafter state of ended requests may be kept."""
    pool = llm.engine.cache.pool
    if pool.available != pool.total:
        yield "cache blocks are still in use after all requests have ended"
    kept = [m.name for m in with_members(llm.engine.drafter) if getattr(m, "states", None)]
    if kept:
        yield f"forget({', '.join(kept)}) must drop all state of a sequence"


def _preempted(plain: LLM, make: Callable[[], DraftLike]) -> Iterator[str]:
    """Texts equal plain decoding's with a cache so small that sequences are preempted: the drafter
    has to forget them, and they return under the same id."""
    per_token = bytes_per_token(plain.target.cache_shapes, plain.target.cache_dtype)
    blocks = sum(len(plain.tokenizer.encode(p)) for p in _PROMPTS) // BLOCK_SIZE + 6
    expected = [done.token_ids for done in plain.generate(_PROMPTS, _GREEDY)]
    memory = blocks * BLOCK_SIZE * per_token
    llm = plain.with_draft(make(), strict=True, draft_length=3, kv_cache_memory=memory)
    if [done.token_ids for done in llm.generate(_PROMPTS, _GREEDY)] != expected:
        yield "the text is not plain decoding's after preemption: does forget drop all?"
    yield from _left_over(llm)


def _distribution(plain: LLM, make: Callable[[], DraftLike]) -> Iterator[str]:
    """The first two tokens of unseeded answers have plain decoding's distribution (chi-square)."""
    params = SamplingParams(max_tokens=2, temperature=1.0, top_k=3, ignore_eos=True, n=_ANSWERS)
    common: dict[str, Any] = {"max_batch_size": 64, "draft_length": 2}
    expected = plain.with_draft(None, seed=1, **common)
    llms = expected, plain.with_draft(make(), seed=5, strict=True, **common)
    for prompt in ("The quick brown fox", *_PROMPTS[1:]):
        ours, theirs = (
            Counter(tuple(done.token_ids) for done in llm.generate(prompt, params)) for llm in llms
        )
        pairs = {**ours, **theirs}
        test = homogeneity([ours[p] for p in pairs], [theirs[p] for p in pairs])
        if test.p_value < _ALPHA:
            seen = f"chi-square {test.statistic:.0f}, p = {test.p_value:.0e}"
            yield (
                f"two tokens of {_ANSWERS} answers are not distributed as plain decoding's "
                f"({seen}): drawn tokens need the q that they were drawn from, and chosen ones "
                "Draw.POINT"
            )


def _proposes(plain: LLM, make: Callable[[], DraftLike]) -> Iterator[str]:
    """The drafter proposes something, so that the other laws were tested at all."""
    done = plain.with_draft(make(), strict=True, draft_length=4).generate(_PROMPTS, _GREEDY)
    if not sum(completion.stats.drafted_tokens for completion in done):
        yield "nothing was proposed in four repetitive texts: nothing was tested"
