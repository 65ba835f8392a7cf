"""The first part of a certification: greedy and seeded texts must be plain decoding's, token for
token, under every setting of the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.bench.prompts import tokens_needed
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import Evidence, Problem, TextCheck, TextDivergence
from paceline.lab.certify.decoding import Start, TokenIds, decode, explain
from paceline.lab.certify.draws import DraftRecorder
from paceline.lab.certify.effort import Effort
from paceline.llm import LLM

NamedPrompts = Sequence[tuple[str, Sequence[int]]]  # names and token ids
_NEIGHBOURS = (5, 17, 40)  # tokens of the other requests in a mixed batch
_TEXT_SHARE = 0.025  # of the remaining budget: what one text at one setting may take
_MIN_TEXT_TOKENS = 16
_TIMED_TOKENS = 4  # decoded to measure the speed
OnProgress = Callable[[str], None]  # receives a description of the next task


class TextCertifier:
    """Compares texts, and holds what all parts of a certification share.

    ``llm`` drafts with the draft ``lengths`` and, if its controller is adaptive, also with the
    lengths that it chooses; ``plain`` decodes the same target without drafts. ``prompts``: (name,
    token ids). ``kinds``: the sampling parameters of each kind of text ("greedy", "seeded").
    ``settings``: the draft length of each setting in which texts are decoded, None for adaptive;
    in the last one they share a ``mixed`` batch with other requests. ``evidence``: the results.
    ``num_texts``, ``num_prefixes``: how many are wanted."""

    def __init__(
        self,
        llm: LLM,
        prompts: NamedPrompts,
        params: SamplingParams | None = None,
        effort: Effort | None = None,
        *,
        budget: Budget | None = None,
    ) -> None:
        self.llm, self.effort, self.budget = llm, effort or Effort(), budget or Budget()
        self.lengths, adaptive = _draft_lengths(llm)
        lengths: tuple[int | None, ...] = (*self.lengths, *([None] if adaptive else []))
        self.settings = {f"draft length {n or 'auto'}, alone": n for n in lengths}
        self.mixed = f"draft length {self.lengths[-1]}, mixed batch"
        self.settings[self.mixed] = self.lengths[-1]
        self.prompts = _fitting_prompts(llm, prompts, self.effort)
        self.num_texts = min(self.effort.num_prompts, len(self.prompts))
        self.plain = llm.with_draft(
            max_batch_size=llm.engine.scheduler.config.max_batch_size,
            max_model_len=tokens_needed(llm, map(itemgetter(1), prompts), self.effort.max_tokens),
        ).engine
        requested = params or SamplingParams(temperature=1.0)
        unused: dict[str, Any] = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
        self.params = replace(requested, seed=None, n=1, logprobs=None, **unused)
        # Greedy, with the same penalties and bias.
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self.kinds = {"greedy": greedy} | ({} if requested.greedy else {"seeded": self.params})
        # No samples are drawn if only greedy decoding is tested.
        self.num_prefixes = 0 if requested.greedy else min(self.effort.prefixes, self.num_texts)
        self.evidence = Evidence(DraftRecorder(self.effort.seed))
        self.advance: OnProgress = lambda description: None

    def start(self, number: int, params: SamplingParams) -> Start:
        name, prompt = self.prompts[number % len(self.prompts)]
        return Start(prompt, params, name=name)

    def amounts(self) -> dict[str, Any]:
        """What was completed in which time, and how much is wanted: "budget" of the JSON."""
        evidence, wanted = self.evidence, self.effort.samples
        drawn = [min(len(prefix.drawn), wanted) for prefix in evidence.prefixes]
        return {
            "seconds": self.budget.seconds,
            "spent": self.budget.spent,
            "tokens": evidence.tokens or self.effort.max_tokens,
            "texts": self.num_compared,
            "texts_wanted": self.num_texts,
            "prefixes": drawn.count(wanted),
            "prefixes_wanted": self.num_prefixes,
            "samples": sum(drawn),
            "samples_wanted": self.num_prefixes * wanted,
        }

    @property
    def complete(self) -> bool:
        amounts = self.amounts()
        return all(amounts[what] >= amounts[f"{what}_wanted"] for what in ("texts", "prefixes"))

    @property
    def num_compared(self) -> int:
        """How many texts were compared under every setting."""
        comparisons = len(self.kinds) * len(self.settings)
        return list(self.evidence.compared.values()).count(comparisons)

    def do_task(self, part: str, kind: str, size: int, shown: str, run: Callable[[], None]) -> bool:
        """Call ``run`` if it fits into the budget, judged by its ``kind`` and ``size``. A crash is
        a problem of ``part``. Returns whether it was done."""
        if not self.budget.fits(kind, size):
            return False
        self.advance(shown)
        try:
            with self.budget.task(kind, size):
                run()
        except PacelineError:
            raise
        except Exception as error:
            what = f"decoding failed with {type(error).__name__}: {error}"
            self.evidence.problems.append(Problem(part, " ".join(what.split())))
            return False
        return True

    def compare_text(self, number: int) -> None:
        """Decode a text of each kind plainly, then compare it under every setting."""
        for kind in self.kinds:
            text = self._text(kind, number)
            run, shown = partial(self._decode_plainly, kind, number, text), f"{kind}: {text.name}"
            if self.do_task(kind, "text", 1, f"{shown}: plain decoding", run):
                for setting in self.settings:
                    run = partial(self._compare, kind, number, setting)
                    cost = "mixed" if setting == self.mixed else "text"
                    self.do_task(kind, cost, 1, f"{shown}: {setting}", run)

    def choose_text_length(self) -> None:
        """Shorten the texts if one text would take too much of the budget."""
        budget, max_tokens = self.budget, self.effort.max_tokens
        if self.evidence.tokens or budget.seconds is None or max_tokens <= _MIN_TEXT_TOKENS:
            return
        for kind, tokens in (("warming up", 1), ("token", _TIMED_TOKENS)):
            with budget.task(kind, tokens):
                decode(self.plain, [self.start(0, SamplingParams(max_tokens=tokens))], 0)
        seconds = budget.estimate("token")
        affordable = _TEXT_SHARE * budget.left / seconds if seconds else max_tokens
        self.evidence.tokens = min(max_tokens, max(_MIN_TEXT_TOKENS, int(affordable)))

    def _text(self, kind: str, number: int) -> Start:
        tokens = self.evidence.tokens or self.effort.max_tokens
        seed = (self.effort.seed + number) % 2**63 if kind == "seeded" else None
        return self.start(number, replace(self.kinds[kind], max_tokens=tokens, seed=seed))

    def _decode_plainly(self, kind: str, number: int, text: Start) -> None:
        ((self.evidence.plain[kind, number], _),) = decode(self.plain, [text], 0)

    def _compare(self, kind: str, number: int, setting: str) -> None:
        others = []
        if setting == self.mixed:  # unseeded requests, which leave while the text is decoded
            for other, tokens in enumerate(_NEIGHBOURS, number):
                params = SamplingParams(temperature=0.8, max_tokens=tokens)
                others.append(self.start(other, params))
        text, plain = self._text(kind, number), self.evidence.plain[kind, number]
        self.evidence.add(self.check_text(kind, setting, text, plain, others))
        self.evidence.compared[number] += 1

    def check_text(
        self, kind: str, setting: str, text: Start, plain: TokenIds, others: Sequence[Start] = ()
    ) -> TextCheck:
        """Decode ``text`` in a batch with ``others`` under this setting and compare it with plain
        decoding's."""
        length = self.settings[setting]
        (output, counts), *_ = decode(self.llm.engine, [text, *others], length)
        divergences = tuple(self._divergences(text, plain, output, length))
        amounts = 1, len(plain), counts.drafted, counts.accepted
        return TextCheck(kind, setting, *amounts, divergences)

    def _divergences(
        self, text: Start, expected: TokenIds, tokens: TokenIds, draft_length: int | None
    ) -> Iterator[TextDivergence]:
        """Each divergence from the ``expected`` text. On a ``batch_invariant`` backend none is a
        near tie. After one the rest is decoded again from the expected text; a bug is the last."""
        target, decoded = self.llm.target, self.llm.tokenizer.decode
        while difference := explain(target, text.prompt, expected, tokens, text.params):
            pair = difference.left, difference.right
            plain, other = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
            bug = target.backend.batch_invariant or not difference.is_tie
            about = {"text": text.name, "plain": plain, "speculative": other, "is_bug": bug}
            yield TextDivergence(**vars(difference) | about)
            given = expected[: difference.at + 1]
            if bug or len(given) == len(expected):
                return
            ((tokens, _),) = decode(self.llm.engine, [replace(text, output=given)], draft_length)


def _draft_lengths(llm: LLM) -> tuple[tuple[int, ...], bool]:
    """The fixed draft lengths to test, and whether the controller is adaptive."""
    engine = llm.engine
    if not engine.drafter.max_nodes(1):
        raise ConfigError("there is no drafter to certify; give one with draft (--draft)")
    if not isinstance(engine.controller, FixedLength):
        return (1, 4), True
    length = engine.controller.length
    if not length:
        raise ConfigError("draft length 0 drafts nothing, so there is nothing to certify")
    return tuple(sorted({1, length})), False


def _fitting_prompts(llm: LLM, prompts: NamedPrompts, effort: Effort) -> list[tuple[str, TokenIds]]:
    """The prompts that fit. Raises PromptError if one of the first ``num_prompts`` does not."""
    if not prompts:
        raise PromptError("no prompt was given")
    limit = llm.max_model_len
    room = limit - effort.max_tokens - 16
    for name, prompt in prompts[: effort.num_prompts]:
        if not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        if len(prompt) > room:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but the context of {llm.target.name} has "
                f"{limit}, with the {effort.max_tokens} new tokens; shorten it or lower max_tokens"
            )
    return [(name, tuple(prompt)) for name, prompt in prompts if 0 < len(prompt) <= room]
