"""What is certified, and how much of it is tested; and its texts, token for token those of plain
decoding: of greedy requests, and of sampled ones with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from operator import itemgetter
from typing import Any

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.bench.prompts import tokens_needed
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import Evidence, Problem, TextCheck, TextDivergence
from paceline.lab.certify.decoding import Start, String, decode, explain
from paceline.lab.certify.draws import Recorder
from paceline.lab.certify.effort import Effort
from paceline.llm import LLM

Pair = tuple[Start, String]  # and plain decoding's output
_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_TIMED = 4  # tokens that are decoded to see how fast that is
OnProgress = Callable[[str], None]  # is told what comes next


class Subject:
    """What every part of a certification is given: who answers, what is asked, for how long.

    ``llm`` drafts, at ``lengths`` and, if it adapts, at its own; ``plain`` decodes the same target
    without drafts. ``prompts``: (name, token ids). ``kinds``: the parameters of each kind of text.
    ``alone``: draft lengths of texts decoded one by one, by setting, None for the adaptive one;
    ``mixed``: the setting of texts in a batch. ``evidence`` is what was seen, ``advance`` is told
    what comes next. Nothing more is done for the parts that are ``broken``.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams | None = None,
        effort: Effort | None = None,
        *,
        budget: Budget | None = None,
    ) -> None:
        self.llm, self.effort, self.budget = llm, effort or Effort(), budget or Budget()
        self.lengths, adapts = _lengths_of(llm)
        alone: dict[str, int | None] = {f"draft length {n}, alone": n for n in self.lengths}
        self.alone = alone | ({"draft length auto, alone": None} if adapts else {})
        self.mixed = f"draft length {self.lengths[-1]}, mixed batch"
        self.prompts = _checked(llm, prompts, self.effort)
        self.plain = llm.beside(
            max_batch_size=llm.engine.scheduler.config.max_batch_size,
            max_model_len=tokens_needed(llm, map(itemgetter(1), prompts), self.effort.max_tokens),
        ).engine
        asked = params or SamplingParams(temperature=1.0)
        unused: dict[str, Any] = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
        self.params = replace(asked, seed=None, n=1, logprobs=None, **unused)
        # With the same penalties and bias.
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self.kinds = {"greedy": greedy} | ({} if asked.greedy else {"seeded": self.params})
        # Prefixes wanted; none if only greedy decoding is tested.
        most = min(self.effort.prefixes, self.effort.num_prompts, len(self.prompts))
        self.prefixes = 0 if asked.greedy else most
        self.evidence = Evidence()
        self.recorder = Recorder(llm.engine.drafter, self.evidence.draws, self.effort.seed)
        self.advance: OnProgress = lambda what: None
        self.broken: set[str] = set()

    @property
    def texts(self) -> int:
        """Texts wanted. Prompts are not repeated."""
        return min(self.effort.num_prompts, len(self.prompts))

    def start(self, number: int, params: SamplingParams) -> Start:
        name, prompt = self.prompts[number % len(self.prompts)]
        return Start(prompt, params, name=name)

    def amounts(self) -> dict[str, Any]:
        """What the time was spent on, of how much that is wanted: JSON's "budget"."""
        evidence, most = self.evidence, self.effort.samples
        drawn = [min(len(prefix.drawn), most) for prefix in evidence.prefixes]
        return {
            "seconds": self.budget.seconds,
            "spent": self.budget.spent,
            "tokens": evidence.tokens or self.effort.max_tokens,
            "texts": self.compared(range(self.texts)),
            "texts_wanted": self.texts,
            "prefixes": drawn.count(most),
            "prefixes_wanted": self.prefixes,
            "samples": sum(drawn),
            "samples_wanted": self.prefixes * most,
        }

    @property
    def complete(self) -> bool:
        """Whether all texts and prefixes that are wanted are there."""
        amounts = self.amounts()
        return all(amounts[what] >= amounts[f"{what}_wanted"] for what in ("texts", "prefixes"))

    def compared(self, numbers: Iterable[int]) -> int:
        """How many of these texts were compared under every setting that decodes them alone."""
        done, ends = set(self.evidence.done), ["", *(f"/{setting}" for setting in self.alone)]
        ways = list(product(self.kinds, ends))
        return sum(all(f"{kind}/{n}{end}" in done for kind, end in ways) for n in numbers)

    def do(
        self, part: str, kind: str, size: int, shown: str, run: Callable[[], None], name: str = ""
    ) -> None:
        """``run`` a piece of work, whole or not at all; ``kind`` and ``size`` tell what it takes.
        ``part`` is at fault if it fails. With a ``name`` it is done once."""
        done = self.evidence.done
        if name in done or part in self.broken or not self.budget.fits(kind, size):
            return
        self.advance(shown)
        with self.guarded(part), self.budget.piece(kind, size):
            run()
            done += [name] if name else []

    @contextmanager
    def guarded(self, part: str) -> Iterator[None]:
        """A crash is a problem of its part, and the other parts still run."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            what = f"decoding failed with {type(error).__name__}: {error}"
            self.evidence.problems.append(Problem(part, " ".join(what.split())))
            self.broken.add(part)

    def compare_texts(self, numbers: Sequence[int]) -> None:
        """Each of the texts plainly, then under every setting; those in a batch come last. What has
        no plain text by then is left out."""
        plain = self.evidence.plain
        for number, kind in product(numbers, self.kinds):
            text, name = self._text(kind, number), f"{kind}/{number}"
            run, shown = partial(self._decode_plainly, name, text), f"{kind}: {text.name}"
            self.do(kind, "text", 1, f"{shown}: plain decoding", run, name)
            for setting in self.alone if name in plain else ():
                run = partial(self._compare, kind, [number], setting)
                self.do(kind, "text", 1, f"{shown}: {setting}", run, f"{name}/{setting}")
        for kind in self.kinds if numbers else ():
            if all(f"{kind}/{number}" in plain for number in numbers):
                run = partial(self._compare, kind, numbers, self.mixed)
                name = f"{kind}/{'-'.join(map(str, numbers))}/{self.mixed}"
                self.do(kind, "mixed", len(numbers), f"{kind}: {self.mixed}", run, name)

    def decide_tokens(self) -> None:
        """Shorter texts if those asked for would take too much of the budget each."""
        budget, most = self.budget, self.effort.max_tokens
        if self.evidence.tokens or budget.seconds is None or most <= _SHORTEST:
            return
        for kind, tokens in (("warming up", 1), ("token", _TIMED)):
            with budget.piece(kind, tokens):
                decode(self.plain, [self.start(0, SamplingParams(max_tokens=tokens))], 0)
        seconds = budget.estimate("token")
        affordable = _SHARE * budget.left / seconds if seconds else most
        self.evidence.tokens = min(most, max(_SHORTEST, int(affordable)))

    def _text(self, kind: str, number: int) -> Start:
        tokens = self.evidence.tokens or self.effort.max_tokens
        seed = (self.effort.seed + number) % 2**63 if kind == "seeded" else None
        return self.start(number, replace(self.kinds[kind], max_tokens=tokens, seed=seed))

    def _decode_plainly(self, name: str, text: Start) -> None:
        ((self.evidence.plain[name], _),) = decode(self.plain, [text], 0)

    def _compare(self, kind: str, numbers: Sequence[int], setting: str) -> None:
        plain, others = self.evidence.plain, list[Start]()
        texts = [(self._text(kind, number), plain[f"{kind}/{number}"]) for number in numbers]
        if setting == self.mixed:
            # Requests of another kind, shorter and longer, that come and go while others decode.
            count = max(_NEIGHBOURS, len(numbers))
            for n, tokens in zip(range(count), cycle((5, 17, 40)), strict=False):
                params = SamplingParams(temperature=0.8, max_tokens=tokens)
                others.append(self.start(numbers[0] + n, params))
        self.evidence.add(self.check_texts(kind, setting, texts, others))

    def check_texts(
        self, kind: str, setting: str, texts: Sequence[Pair], others: Sequence[Start] = ()
    ) -> TextCheck:
        """Decode ``texts`` in one batch under this setting and compare them with plain decoding's.
        ``others`` join the batch and are not compared."""
        length = self.alone.get(setting, self.lengths[-1])
        batch = [*(text for text, _ in texts), *others]
        outputs = decode(self.llm.engine, batch, length)[: len(texts)]
        parted: dict[bool, list[TextDivergence]] = {True: [], False: []}  # by whether it is a tie
        for text, (output, _) in zip(texts, outputs, strict=True):
            for item, tie in self._divergences(*text, output, length):
                parted[tie].append(item)
        counts = sum((counts for _, counts in outputs), DraftCounts())
        tokens = sum(len(plain) for _, plain in texts)
        compared = len(texts), tokens, counts.drafted, counts.accepted
        return TextCheck(kind, setting, *compared, tuple(parted[True]), tuple(parted[False]))

    def _divergences(
        self, text: Start, expected: String, tokens: String, length: int | None
    ) -> Iterator[tuple[TextDivergence, bool]]:
        """All near ties between the two texts, and at their end perhaps one bug; which are ties
        (none on a backend of ``same_bits``). After a tie the rest is decoded anew behind the
        beginning of the ``expected`` text."""
        target, decoded = self.llm.target, self.llm.tokenizer.decode
        while difference := explain(target, text.prompt, expected, tokens, text.params):
            pair = difference.left, difference.right
            plain, other = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
            tie, known = difference.is_tie and not target.backend.same_bits, vars(difference)
            yield TextDivergence(**known, text=text.name, plain=plain, speculative=other), tie
            given = expected[: difference.at + 1]
            if not difference.is_tie or len(given) == len(expected):
                return
            ((tokens, _),) = decode(self.llm.engine, [replace(text, output=given)], length)


def _lengths_of(llm: LLM) -> tuple[tuple[int, ...], bool]:
    engine = llm.engine
    if not engine.drafter.max_nodes(1):
        raise ConfigError("there is no drafter to certify; give one with draft (--draft)")
    if not isinstance(engine.controller, FixedLength):
        return (1, 4), True
    length = engine.controller.length
    if not length:
        raise ConfigError("draft length 0 drafts nothing, so there is nothing to certify")
    return tuple(sorted({1, length})), False


def _checked(
    llm: LLM, prompts: Sequence[tuple[str, Sequence[int]]], effort: Effort
) -> list[tuple[str, tuple[int, ...]]]:
    """Those that fit; of the first ones, which are wanted at once, all must."""
    if not prompts:
        raise PromptError("no prompt was given")
    limit = llm.max_model_len
    room = limit - effort.max_tokens - 16
    for name, prompt in prompts[: effort.num_prompts]:
        if not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        if len(prompt) > room:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but {llm.target.name} sees {limit} with "
                f"the {effort.max_tokens} that are decoded; shorten it or lower max_tokens"
            )
    return [(name, tuple(prompt)) for name, prompt in prompts if 0 < len(prompt) <= room]
