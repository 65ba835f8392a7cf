"""The verifier decides which drafted tokens are accepted, and which token follows them.

The acceptance rule depends on the request and its draft, not on what else is in the batch:

=======================================  =========================================================
greedy, or with a seed (coupled rule)    match: take the target's token y, descend if y is a child
no seed, POINT draft or none             match, with y sampled from p by the engine's generator
no seed, IID chain                       block verification, or the token-by-token rule
no seed, siblings without replacement    accept or take the residual, sibling by sibling
=======================================  =========================================================

Decisions are computed on the device. One transfer brings them to the host, which walks the trees.
On a CPU the native kernels compute the decisions where they can (kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from paceline.verify.kernels import KernelDecisions, SampledSpan, can_use_kernels, decide_in_kernels
from paceline.verify.logprobs import StepLogprobs
from paceline.verify.rules import RuleProbabilities, block, pad_to_same_width, siblings

_UNIFORM_STEPS = 32  # steps whose uniforms are drawn by one call of the generator
RULES = ("auto", "token", "block", "coupled")
LosslessRule = Literal["match", "siblings", "block"]
NO_DISTRIBUTION = (
    "no token can follow: the model's scores are not finite here, or the request's parameters "
    "forbid every token; change the parameters, or check the model's weights"
)


def rule_for(span: Span, rule: str = "auto") -> LosslessRule:
    """The acceptance rule for the span's tree under the verifier's ``rule``. Under "coupled", a
    request that still has no seed is matched against fresh samples, which is lossless as well."""
    tree = span.tree
    if not len(tree) or tree.draw is Draw.POINT or not draws_unseeded(span.seq.params):
        return "match"
    if rule == "coupled":
        return "match"
    if span.tree.draw is Draw.IID and rule != "token":
        return "block"
    return "siblings"


def walk_matching(
    parents: tuple[int, ...], tokens: Sequence[int], choices: Sequence[int]
) -> tuple[int, ...]:
    """The accepted path of the match rule: from the root down while the target's token is among the
    children. ``choices[0]`` is its token after the last committed one, ``choices[i + 1]`` that
    after node i."""
    return walk_first_accepted(
        parents, [t == choices[p + 1] for t, p in zip(tokens, parents, strict=True)]
    )


def walk_first_accepted(
    parents: tuple[int, ...], accepted: Sequence[bool | int]
) -> tuple[int, ...]:
    """The accepted path of the sibling rule: descend to the first accepted child each time."""
    children, path, row = children_of(parents), list[int](), 0
    while True:
        for child in children[row]:
            if accepted[child]:
                path.append(child)
                row = child + 1
                break
        else:
            return tuple(path)


def walk_last_accepted(parents: tuple[int, ...], accepted: Sequence[bool | int]) -> tuple[int, ...]:
    """The path of block verification: up to the chain's last accepted node, past rejected ones."""
    return tuple(range(max((n + 1 for n in range(len(parents)) if accepted[n]), default=0)))


class DeviceDecisions(NamedTuple):
    """``choices`` int64 [R]: the target's token at each row; NO_TOKEN if the row is no
    distribution. ``accepted`` [N]: decisions on nodes, booleans or 0 and 1; None if all trees are
    matched."""

    choices: torch.Tensor
    accepted: torch.Tensor | None = None


class Verifier:
    """Verifies the trees of a step with one device synchronisation. ``rule`` chooses the rule for
    sampled chains of requests without a seed: "token", "block", "coupled" (each request gets a seed
    at admission) or "auto" (block); others raise ConfigError. ``generator``: on the logits' device;
    None is torch's default."""

    def __init__(self, rule: str = "auto", generator: torch.Generator | None = None) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule is {rule!r}; use one of {', '.join(RULES)}")
        self.rule = rule
        self.generator = generator
        self._drawn: tuple[int, Iterator[torch.Tensor]] = 0, iter(())
        kind = type(self)
        # The kernels know these rules only: a subclass with other rules runs in torch.
        self._has_default_rules = (
            kind._decide is Verifier._decide
            and kind.rule_probabilities is Verifier.rule_probabilities
        )

    def __call__(
        self, logits: torch.Tensor, spans: Sequence[Span], greedy: Sequence[int] | None = None
    ) -> list[Verdict]:
        """One verdict per span, in order, from the step's logits [R, V]. These may have rows of
        other spans, and be wider than the vocabulary. ``greedy``: the argmax of every row, as in
        ModelOutput."""
        if greedy is not None and not needs_logits(span.seq for span in spans):
            return [
                self._verdict(s, s.tree.host_tokens(), greedy[s.logit_row : s.end_logit_row])
                for s in spans
            ]
        if not spans:
            return []
        if self._has_default_rules and self._can_use_kernels(spans, logits, greedy):
            return self._verify_in_kernels(logits, spans, greedy or ())
        return self._verify_in_torch(logits, spans)

    # -- decisions by the native kernels ----------------------------------------------------------

    def _can_use_kernels(
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
            elif rule_for(span, self.rule) == "siblings":
                return False
            else:
                sampled = True
        return not sampled or can_use_kernels(logits)

    def _verify_in_kernels(
        self, logits: torch.Tensor, spans: Sequence[Span], greedy: Sequence[int]
    ) -> list[Verdict]:
        rows = sum(span.verify_rows for span in spans)
        blocks = [rule_for(span, self.rule) == "block" for span in spans]
        nodes = rows - len(spans) if any(blocks) else 0
        draws = any(draws_unseeded(span.seq.params) for span in spans)
        uniforms = self.uniforms(rows + nodes, logits.device) if draws else None
        adjusted = [span for span in spans if not is_unadjusted(span.seq)]
        scores = iter(_adjusted_scores(logits, adjusted) if adjusted else ())
        greedy_decisions: list[KernelDecisions | None] = []  # None: the span is sampled
        sampled: list[SampledSpan] = []
        row = 0
        for number, (span, is_block) in enumerate(zip(spans, blocks, strict=True)):
            unadjusted = is_unadjusted(span.seq)
            if span.seq.params.greedy and unadjusted:
                greedy_decisions.append((greedy[span.logit_row : span.end_logit_row], ()))
            elif span.seq.params.greedy:
                greedy_decisions.append((greedy_choice(next(scores)).tolist(), ()))
            else:
                part, first = (logits, span.logit_row) if unadjusted else (next(scores), 0)
                node = rows + row - number if is_block else None
                sampled.append(SampledSpan(span, part, first, row, node))
                greedy_decisions.append(None)
            row += span.verify_rows
        sampled_decisions = iter(decide_in_kernels(sampled, uniforms) if sampled else ())
        return [
            self._verdict(span, span.tree.host_tokens(), *(known or next(sampled_decisions)))
            for span, known in zip(spans, greedy_decisions, strict=True)
        ]

    # -- decisions by torch, on the device ------------------------------------------------------

    @torch.inference_mode()
    def _verify_in_torch(self, logits: torch.Tensor, spans: Sequence[Span]) -> list[Verdict]:
        logits = _select_rows(logits, spans)
        wanted = any(span.seq.params.logprobs is not None for span in spans)
        if not needs_logits(span.seq for span in spans):
            return self._verdicts(spans, DeviceDecisions(greedy_choice(logits)), None)
        rows = Rows.of(spans)
        greedy = all(span.seq.params.greedy for span in spans)
        if greedy and not wanted:
            tokens = greedy_tokens(apply_logits_processors(logits, rows), rows)
            return self._verdicts(spans, DeviceDecisions(tokens), None)
        scores = adjust_logits(apply_logits_processors(logits, rows), rows)
        if greedy:
            decisions = DeviceDecisions(greedy_choice(scores))
        else:
            decisions = self._decide(scores, rows, spans)
        return self._verdicts(spans, decisions, scores if wanted else None)

    def _decide(self, scores: torch.Tensor, rows: Rows, spans: Sequence[Span]) -> DeviceDecisions:
        probs = scores_to_probs(scores, [seq.params for seq in rows.seqs])
        if all(is_coupled(seq.params) for seq in rows.seqs):
            return DeviceDecisions(coupled_tokens(probs, rows))
        probs, valid = _replace_nan_rows(probs)
        rule = self.rule_probabilities(probs, spans)
        nodes = 0 if rule is None else rule.accept.shape[0]
        uniforms = self.uniforms(len(rows) + nodes, scores.device)
        stop = probs if rule is None else rule.stop
        choices = sample_stop_tokens(probs, stop, rows, uniforms[: len(rows)])
        if valid is not None:
            choices = torch.where(valid, choices, NO_TOKEN)
        if rule is None:
            return DeviceDecisions(choices)
        return DeviceDecisions(choices, uniforms[len(rows) :] < rule.accept)

    def uniforms(self, count: int, device: torch.device) -> torch.Tensor:
        """float64 [count] in [0, 1): one per row, for its choice, then one per node. While steps
        have the same count, numbers for many steps are drawn at once: a call of the generator takes
        60 us after a forward, which has evicted the processor's caches."""
        last_count, drawn = self._drawn
        numbers = next(drawn, None) if last_count == count else None
        if numbers is None:
            options: Any = {"dtype": torch.float64, "generator": self.generator}
            steps = _UNIFORM_STEPS if last_count == count else 1
            drawn = iter(torch.rand(steps, count, device=device, **options).unbind())
            self._drawn, numbers = (count, drawn), next(drawn)
        return numbers

    def reseed(self, seed: int) -> None:
        """Draw from now on as a new verifier with a generator of this seed would."""
        if self.generator is not None:
            self.generator.manual_seed(seed)
            self._drawn = 0, iter(())

    def rule_probabilities(
        self, probs: torch.Tensor, spans: Sequence[Span]
    ) -> RuleProbabilities | None:
        """Acceptance probabilities and stop distributions, given the target's ``probs`` [R, V] at
        each row of the spans; None if all trees are matched."""
        methods = [rule_for(span, self.rule) for span in spans]
        wanted = sorted(set(methods) - {"match"})
        if not wanted:
            return None
        if len(set(methods)) == 1:
            return _apply_rule(methods[0], probs, spans)
        pairs = list(zip(spans, methods, strict=True))
        of_rows = [m for span, m in pairs for _ in range(span.verify_rows)]
        of_nodes = [m for span, m in pairs for _ in range(len(span.tree))]
        accept, stop = probs.new_zeros(len(of_nodes)), probs
        for method in wanted:
            rows, nodes = (
                transfer.to_device([i for i, m in enumerate(of) if m == method], probs.device)
                for of in (of_rows, of_nodes)
            )
            of_method = [span for span, m in pairs if m == method]
            part = _apply_rule(method, probs.index_select(0, rows), of_method)
            stop, part_stop = pad_to_same_width(stop, part.stop)
            stop = stop.index_copy(0, rows, part_stop)
            accept[nodes] = part.accept
        return RuleProbabilities(accept, stop)

    # -- the transfer to the host, and the walk -----------------------------------------------

    def _verdicts(
        self, spans: Sequence[Span], decisions: DeviceDecisions, scores: torch.Tensor | None
    ) -> list[Verdict]:
        parts = [span.tree.tokens for span in spans if len(span.tree)]
        nodes = sum(len(span.tree) for span in spans)
        parts += [part for part in decisions if part is not None]
        num_integers = 2 * nodes + len(spans) + (decisions.accepted is not None) * nodes
        report = None
        if scores is not None:
            report = StepLogprobs.of(scores, spans, decisions.choices)
            parts.append(report.values)
        values = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist()
        integers = values if report is None else list(map(int, values[:num_integers]))
        tokens, choices = integers[:nodes], integers[nodes : 2 * nodes + len(spans)]
        accepted = integers[2 * nodes + len(spans) :]
        verdicts: list[Verdict] = []
        row = node = 0
        for span in spans:
            end = node + len(span.tree)
            row_end = row + span.verify_rows
            decided = tokens[node:end], choices[row:row_end], accepted[node:end]
            verdict = self._verdict(span, *decided)
            most = span.seq.params.logprobs
            if report is not None and verdict.tokens and most is not None:
                logprobs = report.read(values[num_integers:], row, node, verdict, most)
                verdict = replace(verdict, logprobs=logprobs)
            verdicts.append(verdict)
            row, node = row_end, end
        return verdicts

    def _verdict(
        self,
        span: Span,
        tokens: Sequence[int],
        choices: Sequence[int],
        accepted: Sequence[int] = (),
    ) -> Verdict:
        """The verdict on a tree with these ``tokens``. ``choices``: the target's token at each of
        its rows; ``accepted``: the decision on each node (rules other than match)."""
        path = self._path(span, tokens, choices, accepted) if tokens else ()
        end = path[-1] + 1 if path else 0
        if min(choices) < 0 and any(choices[row] < 0 for row in (0, *(i + 1 for i in path))):
            # NO_TOKEN at a row on the path. Off the path it does not matter.
            return Verdict((), (), error=NO_DISTRIBUTION)
        valid_choices = tuple([max(choice, 0) for choice in choices])
        return Verdict(path, (*[tokens[i] for i in path], choices[end]), valid_choices)

    def _path(
        self, span: Span, tokens: Sequence[int], choices: Sequence[int], accepted: Sequence[int]
    ) -> tuple[int, ...]:
        """The accepted nodes, from the root down."""
        parents, method = span.tree.parents, rule_for(span, self.rule)
        if method == "match":
            return walk_matching(parents, tokens, choices)
        if method == "block":
            return walk_last_accepted(parents, accepted)
        return walk_first_accepted(parents, accepted)


def _replace_nan_rows(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace rows of NaN in distributions [R, V] by uniform ones. Returns also which rows are
    valid, bool [R], None if all are. Block verification looks ahead, and NaN in a later row must
    not decide on the nodes before it."""
    valid = ~probs[:, 0].isnan()  # a softmax that fails is NaN in the whole row
    if probs.device.type == "cpu" and bool(valid.all()):  # no synchronisation on a CPU
        return probs, None
    return torch.where(valid.unsqueeze(1), probs, 1.0 / probs.shape[1]), valid


@torch.inference_mode()
def _adjusted_scores(logits: torch.Tensor, spans: Sequence[Span]) -> tuple[torch.Tensor, ...]:
    """For each span float32 [rows, V]: its logits after bias, penalties and grammars."""
    scores = adjust_logits(_select_rows(logits, spans), Rows.of(spans))
    return torch.split(scores, [span.verify_rows for span in spans])


def _select_rows(logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The rows of the logits that belong to the spans, one span after another."""
    total = 0
    for span in spans:
        if span.logit_row != total:
            rows = [row for s in spans for row in range(s.logit_row, s.end_logit_row)]
            return logits[transfer.to_device(rows, logits.device)]
        total += span.verify_rows
    return logits if logits.shape[0] == total else logits[:total]


def _apply_rule(
    method: LosslessRule, probs: torch.Tensor, spans: Sequence[Span]
) -> RuleProbabilities:
    """Apply "siblings" or "block" to the distributions [R, V] of spans with sampled drafts."""
    p, *wide = pad_to_same_width(probs, *(span.tree.q for span in spans if span.tree.q is not None))
    # Neither rule writes to q, so the q of a single tree needs no copy.
    q = torch.cat(wide) if len(wide) > 1 else wide[0]
    tokens = torch.cat([span.tree.tokens for span in spans])
    shapes = tuple(span.tree.parents for span in spans)
    return (block if method == "block" else siblings)(p, q, tokens, shapes)
