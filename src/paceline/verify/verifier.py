"""The verifier: which drafted tokens are accepted, and the token after them.

Per request, whatever else is in the batch:

=======================================  =========================================================
greedy, or with a seed (coupled rule)    match: the row's own choice y, descend while y is a child
no seed, POINT draft or none             match, with y drawn from p by the engine's generator
no seed, IID chain                       block verification, or the token rule
no seed, siblings without replacement    the residual rule, sibling by sibling
=======================================  =========================================================

Decisions are made on the device; one transfer brings them to the host, where trees are walked. On a
processor the kernels make them where they can (kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from paceline.core import transfer
from paceline.core.batch import Span, Verdict
from paceline.core.draws import coupled_tokens, draws_unseeded, is_coupled, sample_stop_tokens
from paceline.core.sampling import (
    NO_TOKEN,
    Rows,
    adjust_logits,
    apply_logits_processors,
    greedy_choice,
    greedy_tokens,
    is_unadjusted,
    needs_logits,
    scores_to_probs,
)
from paceline.core.tree import Draw, children_of
from paceline.errors import ConfigError
from paceline.verify.kernels import Decided, Question, can_decide, decide
from paceline.verify.logprobs import StepLogprobs
from paceline.verify.rules import RuleProbabilities, aligned, block, siblings

_STEPS = 32  # for which uniforms are drawn at once
RULES = ("auto", "token", "block", "coupled")
LosslessRule = Literal["match", "siblings", "block"]
NO_DISTRIBUTION = (
    "no token can follow: the model's scores are not finite here, or the request's parameters "
    "forbid every token; change the parameters, or check the model's weights"
)


def method_of(span: Span, rule: str = "auto") -> LosslessRule:
    """The procedure for this tree. Under "coupled" a request without a seed is matched against
    fresh draws: just as lossless."""
    tree = span.tree
    if not len(tree) or tree.draw is Draw.POINT or not draws_unseeded(span.seq.params):
        return "match"
    if rule == "coupled":
        return "match"
    if span.tree.draw is Draw.IID and rule != "token":
        return "block"
    return "siblings"


def matching(
    parents: tuple[int, ...], tokens: Sequence[int], choices: Sequence[int]
) -> tuple[int, ...]:
    """Down from the root while the row's choice is among its children: ``choices[0]`` follows the
    last committed token, ``choices[i + 1]`` node i."""
    return first_accepted(
        parents, [t == choices[p + 1] for t, p in zip(tokens, parents, strict=True)]
    )


def first_accepted(parents: tuple[int, ...], accepted: Sequence[bool | int]) -> tuple[int, ...]:
    """Down from the root, each time to the first accepted child."""
    children, path, row = children_of(parents), list[int](), 0
    while True:
        for child in children[row]:
            if accepted[child]:
                path.append(child)
                row = child + 1
                break
        else:
            return tuple(path)


def last_accepted(parents: tuple[int, ...], accepted: Sequence[bool | int]) -> tuple[int, ...]:
    """Along a chain to the last accepted node, past refused ones."""
    return tuple(range(max((n + 1 for n in range(len(parents)) if accepted[n]), default=0)))


@dataclass(frozen=True)
class Decisions:
    """``choices`` int64 [R]: the token that each row yields, NO_TOKEN if its distribution is none;
    ``accepted`` [N] or None: decisions on nodes, as booleans or a rule's own integers."""

    choices: torch.Tensor
    accepted: torch.Tensor | None = None


class Judged(NamedTuple):
    """One tree on the host: its tokens, its rows' choices, and the decisions on its nodes."""

    tokens: Sequence[int]
    choices: Sequence[int]
    accepted: Sequence[int] = ()


class Verifier:
    """Applies the lossless rule to every tree of a step; one device synchronisation. ``rule`` is
    for unseeded sampled chains: "token", "block", "coupled" (each request gets a seed at
    admission), or "auto" (block); others raise ConfigError. ``generator``: on the logits' device;
    None is torch's default."""

    def __init__(self, rule: str = "auto", generator: torch.Generator | None = None) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule is {rule!r}; use one of {', '.join(RULES)}")
        self.rule = rule
        self.generator = generator
        self._drawn: tuple[int, Iterator[torch.Tensor]] = 0, iter(())
        usual, kind = Verifier, type(self)
        self._decides_as_usual = (  # the kernels know no other way
            kind._decide is usual._decide and kind.rule_probabilities is usual.rule_probabilities
        )

    def __call__(
        self, logits: torch.Tensor, spans: Sequence[Span], greedy: Sequence[int] | None = None
    ) -> list[Verdict]:
        """Verdicts on ``spans``, in order, from the step's logits [R, V], which may have more rows,
        and be wider than the vocabulary. ``greedy`` as in ModelOutput."""
        if greedy is not None and not needs_logits(span.seq for span in spans):
            return [
                self._verdict(
                    s, Judged(s.tree.host_tokens(), greedy[s.logit_row : s.end_logit_row])
                )
                for s in spans
            ]
        if not spans:
            return []
        if self._decides_as_usual and self._is_quick(spans, logits, greedy):
            return self._quick(logits, spans, greedy or ())
        return self._judged(logits, spans)

    # -- deciding in the kernels ----------------------------------------------------------------

    def _is_quick(
        self, spans: Sequence[Span], logits: torch.Tensor, greedy: Sequence[int] | None
    ) -> bool:
        if transfer.has_separate_memory(logits.device):
            return False
        sampled = False
        for span in spans:
            params = span.seq.params
            if params.logprobs is not None or params.logits_processors:
                return False
            if params.greedy:
                if greedy is None:
                    return False
            elif method_of(span, self.rule) == "siblings":
                return False
            else:
                sampled = True
        return not sampled or can_decide(logits)

    def _quick(
        self, logits: torch.Tensor, spans: Sequence[Span], greedy: Sequence[int]
    ) -> list[Verdict]:
        rows = sum(span.verify_rows for span in spans)
        blocks = [method_of(span, self.rule) == "block" for span in spans]
        nodes = rows - len(spans) if any(blocks) else 0
        drawn = any(draws_unseeded(span.seq.params) for span in spans)
        uniforms = self.uniforms(rows + nodes, logits.device) if drawn else None
        others = [span for span in spans if not is_unadjusted(span.seq)]
        scores = iter(_adjusted_rows(logits, others) if others else ())
        decided: list[Decided | None] = []
        questions: list[Question] = []
        row = 0
        for number, (span, is_block) in enumerate(zip(spans, blocks, strict=True)):
            plain = is_unadjusted(span.seq)
            if span.seq.params.greedy and plain:
                decided.append((greedy[span.logit_row : span.end_logit_row], ()))
            elif span.seq.params.greedy:
                decided.append((greedy_choice(next(scores)).tolist(), ()))
            else:
                part, first = (logits, span.logit_row) if plain else (next(scores), 0)
                node = rows + row - number if is_block else None
                questions.append(Question(span, part, first, row, node))
                decided.append(None)
            row += span.verify_rows
        answers = iter(decide(questions, uniforms) if questions else ())
        pairs = zip(spans, decided, strict=True)
        return [
            self._verdict(span, Judged(span.tree.host_tokens(), *(known or next(answers))))
            for span, known in pairs
        ]

    @torch.inference_mode()
    def _judged(self, logits: torch.Tensor, spans: Sequence[Span]) -> list[Verdict]:
        logits = _rows_of(logits, spans)
        wanted = any(span.seq.params.logprobs is not None for span in spans)
        if not needs_logits(span.seq for span in spans):
            return self._verdicts(spans, Decisions(greedy_choice(logits)), None)
        rows = Rows.of(spans)
        greedy = all(span.seq.params.greedy for span in spans)
        if greedy and not wanted:
            tokens = greedy_tokens(apply_logits_processors(logits, rows), rows)
            return self._verdicts(spans, Decisions(tokens), None)
        scores = adjust_logits(apply_logits_processors(logits, rows), rows)
        if greedy:
            decisions = Decisions(greedy_choice(scores))
        else:
            decisions = self._decide(scores, rows, spans)
        return self._verdicts(spans, decisions, scores if wanted else None)

    # -- deciding, on the device --------------------------------------------------------------

    def _decide(self, scores: torch.Tensor, rows: Rows, spans: Sequence[Span]) -> Decisions:
        probs = scores_to_probs(scores, [seq.params for seq in rows.seqs])
        if all(is_coupled(seq.params) for seq in rows.seqs):
            return Decisions(coupled_tokens(probs, rows))
        probs, sound = _without_nan(probs)
        outcome = self.rule_probabilities(probs, spans)
        nodes = 0 if outcome is None else outcome.accept.shape[0]
        uniforms = self.uniforms(len(rows) + nodes, scores.device)
        stop = probs if outcome is None else outcome.stop
        choices = sample_stop_tokens(probs, stop, rows, uniforms[: len(rows)])
        if sound is not None:
            choices = torch.where(sound, choices, NO_TOKEN)
        if outcome is None:
            return Decisions(choices)
        return Decisions(choices, uniforms[len(rows) :] < outcome.accept)

    def uniforms(self, count: int, device: torch.device) -> torch.Tensor:
        """float64 [count] in [0, 1): one per row, for its choice, then one per node. Drawn for many
        steps where steps are alike: a call of the generator takes 60 us behind a forward, which has
        emptied the processor's caches."""
        last_count, drawn = self._drawn
        numbers = next(drawn, None) if last_count == count else None
        if numbers is None:
            options: Any = {"dtype": torch.float64, "generator": self.generator}
            steps = _STEPS if last_count == count else 1
            drawn = iter(torch.rand(steps, count, device=device, **options).unbind())
            self._drawn, numbers = (count, drawn), next(drawn)
        return numbers

    def reseed(self, seed: int) -> None:
        """Draw as a new verifier does whose generator has this seed."""
        if self.generator is not None:
            self.generator.manual_seed(seed)
            self._drawn = 0, iter(())

    def rule_probabilities(
        self, probs: torch.Tensor, spans: Sequence[Span]
    ) -> RuleProbabilities | None:
        """From the target's ``probs`` [R, V] at each judged row of the spans; None if all are
        matched."""
        methods = [method_of(span, self.rule) for span in spans]
        wanted = sorted(set(methods) - {"match"})
        if not wanted:
            return None
        if len(set(methods)) == 1:
            return _apply(methods[0], probs, spans)
        pairs = list(zip(spans, methods, strict=True))
        of_rows = [m for span, m in pairs for _ in range(span.verify_rows)]
        of_nodes = [m for span, m in pairs for _ in range(len(span.tree))]
        accept, stop = probs.new_zeros(len(of_nodes)), probs
        for method in wanted:
            rows, nodes = (
                transfer.to_device([i for i, m in enumerate(of) if m == method], probs.device)
                for of in (of_rows, of_nodes)
            )
            part = _apply(method, probs.index_select(0, rows), [s for s, m in pairs if m == method])
            stop, part_stop = aligned(stop, part.stop)
            stop = stop.index_copy(0, rows, part_stop)
            accept[nodes] = part.accept
        return RuleProbabilities(accept, stop)

    # -- the one transfer, and the walk -------------------------------------------------------

    def _verdicts(
        self, spans: Sequence[Span], decisions: Decisions, scores: torch.Tensor | None
    ) -> list[Verdict]:
        parts = [span.tree.tokens for span in spans if len(span.tree)]
        nodes = sum(len(span.tree) for span in spans)
        decided = 2 * nodes + len(spans)
        parts.append(decisions.choices)
        if decisions.accepted is not None:
            parts.append(decisions.accepted)
            decided += nodes
        report = None
        if scores is not None:
            report = StepLogprobs.of(scores, spans, decisions.choices)
            parts.append(report.values)
        values = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist()
        whole = values if report is None else list(map(int, values[:decided]))
        tokens, choices = whole[:nodes], whole[nodes : 2 * nodes + len(spans)]
        accepted = whole[2 * nodes + len(spans) :]
        verdicts: list[Verdict] = []
        row = node = 0
        for span in spans:
            end = node + len(span.tree)
            row_end = row + span.verify_rows
            judged = Judged(tokens[node:end], choices[row:row_end], accepted[node:end])
            verdict = self._verdict(span, judged)
            most = span.seq.params.logprobs
            if report is not None and verdict.tokens and most is not None:
                logprobs = report.read(values[decided:], row, node, verdict, most)
                verdict = replace(verdict, logprobs=logprobs)
            verdicts.append(verdict)
            row, node = row_end, end
        return verdicts

    def _verdict(self, span: Span, judged: Judged) -> Verdict:
        tokens, choices, _ = judged
        path = self._path(span, judged) if tokens else ()
        end = path[-1] + 1 if path else 0
        if min(choices) < 0 and any(choices[at] < 0 for at in (0, *(i + 1 for i in path))):
            # NO_TOKEN at a row of the walk; elsewhere it does not matter.
            return Verdict((), (), error=NO_DISTRIBUTION)
        shown = tuple([max(choice, 0) for choice in choices])
        return Verdict(path, (*[tokens[i] for i in path], choices[end]), shown)

    def _path(self, span: Span, judged: Judged) -> tuple[int, ...]:
        parents, (tokens, choices, accepted) = span.tree.parents, judged
        method = method_of(span, self.rule)
        if method == "match":
            return matching(parents, tokens, choices)
        if method == "block":
            return last_accepted(parents, accepted)
        return first_accepted(parents, accepted)


def _without_nan(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The distributions [R, V] with uniform ones in place of NaN, and which rows are sound (None:
    all). Block verification looks ahead, and must not judge a path by such a row."""
    sound = ~probs[:, 0].isnan()  # a softmax that fails is NaN throughout
    if probs.device.type == "cpu" and bool(sound.all()):  # no synchronisation here
        return probs, None
    return torch.where(sound.unsqueeze(1), probs, 1.0 / probs.shape[1]), sound


@torch.inference_mode()
def _adjusted_rows(logits: torch.Tensor, spans: Sequence[Span]) -> tuple[torch.Tensor, ...]:
    """float32 [rows, V] of each span: its rows after bias, penalties and grammars."""
    scores = adjust_logits(_rows_of(logits, spans), Rows.of(spans))
    return torch.split(scores, [span.verify_rows for span in spans])


def _rows_of(logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The spans' rows of the logits, one span after another."""
    total = 0
    for span in spans:
        if span.logit_row != total:
            rows = [row for s in spans for row in range(s.logit_row, s.end_logit_row)]
            return logits[transfer.to_device(rows, logits.device)]
        total += span.verify_rows
    return logits if logits.shape[0] == total else logits[:total]


def _apply(method: LosslessRule, probs: torch.Tensor, spans: Sequence[Span]) -> RuleProbabilities:
    """One procedure on the distributions [R, V] of some spans with sampled drafts."""
    p, *wide = aligned(probs, *(span.tree.q for span in spans if span.tree.q is not None))
    # Neither rule writes to q, so a lone tree's needs no copy.
    q = torch.cat(wide) if len(wide) > 1 else wide[0]
    tokens = torch.cat([span.tree.tokens for span in spans])
    shapes = tuple(span.tree.parents for span in spans)
    return (block if method == "block" else siblings)(p, q, tokens, shapes)
