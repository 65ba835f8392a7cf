"""From logits to a request's distribution, along the paths of a draft tree.

The order is that of vLLM: ``logits_processors`` (only the verifier applies them), ``logit_bias``
and ``min_tokens``, then repetition, presence and frequency penalties, grammar, temperature, min_p,
top_k, top_p. Everything is float32. Verifier and drafters use the same functions. Ties do not
depend on the order of a sort: top_k keeps all tokens that are as likely as the k-th, top_p all that
are as likely as the last one of the smallest set with that mass, greedy takes the lowest id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.batch import Span
from paceline.core.params import SamplingParams
from paceline.core.ranking import param_column, row_max, truncate
from paceline.core.sequence import Occurrences, SequenceView, TokenView
from paceline.core.transfer import to_device, upload
from paceline.core.tree import paths_of
from paceline.errors import ConfigError

# Beyond this the softmax of float32 logits is one-hot anyway.
_MAX_INVERSE_TEMPERATURE = 1e30
# Above this, score times inverse temperature may overflow float32, see _apply_temperature.
_LARGE_INVERSE_TEMPERATURE = 1e6
NO_TOKEN = -1  # the choice at a row that is not a distribution; the verifier ends its request


@lru_cache(maxsize=512)
def _path_index(parents: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [n + 1, depth]: for each row of a tree the nodes on its path, padded with zeros."""
    paths = paths_of(parents)
    depth = max(map(len, paths))
    return to_device([[*path, *[0] * (depth - len(path))] for path in paths], device)


def _tree_paths(spans: Sequence[Span]) -> torch.Tensor:
    """int64 [R, depth]: the drafted tokens on the path to each row, padded with any values."""
    deepest = max(max(span.tree.depths, default=0) for span in spans)
    parts = []
    for span in spans:
        index = _path_index(span.tree.parents, span.tree.tokens.device)
        part = span.tree.tokens[index] if len(span.tree) else index
        parts.append(torch.nn.functional.pad(part, (0, deepest - part.shape[1])))
    return torch.cat(parts)


def _host_paths(spans: Sequence[Span]) -> tuple[tuple[int, ...], ...] | None:
    """The drafted tokens on the path to each row; () for sequences that do not need them on the
    host. None if none does, or if a tree's tokens are not being copied to the host."""
    if not any(span.seq.needs_host_tokens for span in spans):
        return None
    paths: list[tuple[int, ...]] = []
    for span in spans:
        if not span.seq.needs_host_tokens or not len(span.tree):
            paths += [()] * span.verify_rows
        elif span.tree_tokens is None:
            return None
        else:
            tokens = span.tree_tokens.values()
            paths += [tuple([tokens[n] for n in path]) for path in paths_of(span.tree.parents)]
    return tuple(paths)


@dataclass(frozen=True)
class Rows:
    """The sequence and the tree path that each row of logits belongs to.

    ``seqs[r]``: the sequence of row r. ``depths[r]``: number of drafted tokens between its last
    committed token and the row. ``paths[r, :depths[r]]``: these tokens, int64 ``[R, D]`` on the
    logits' device; required if ``needs_paths``. ``host_paths``: the same on the host, for rows of
    sequences with a grammar or logits processors."""

    seqs: tuple[SequenceView, ...]
    depths: tuple[int, ...]
    paths: torch.Tensor | None = None
    host_paths: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.seqs) == len(self.depths)
        assert self.paths is not None or not any(self.depths) or not needs_paths(self.seqs)

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def positions(self) -> list[int]:
        """Index in its sequence of the token that each row predicts."""
        return [len(s.tokens) + depth for s, depth in zip(self.seqs, self.depths, strict=True)]

    @property
    def on_host(self) -> Sequence[tuple[int, ...]]:
        """The path of each row on the host; waits for the device unless they are known."""
        if self.host_paths is not None or self.paths is None:
            return self.host_paths or [()] * len(self)
        return [tuple(p[:d]) for p, d in zip(self.paths.tolist(), self.depths, strict=True)]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Rows:
        """The rows of the spans: one after the last committed token, then one after each node."""
        seqs = tuple(span.seq for span in spans for _ in range(span.verify_rows))
        depths = tuple(depth for span in spans for depth in (0, *span.tree.depths))
        needed = any(needs_paths((s.seq,)) or s.seq.needs_host_tokens for s in spans)
        paths = _tree_paths(spans) if needed else None
        return cls(seqs, depths, paths, _host_paths(spans))

    def select(self, index: Sequence[int]) -> Rows:
        """The rows at the given indices."""
        seqs, depths, paths = self.seqs, self.depths, self.paths
        if paths is not None:
            paths = paths[to_device(list(index), paths.device)]
        host_paths = self.host_paths and tuple(self.host_paths[i] for i in index)
        return Rows(
            tuple(seqs[i] for i in index), tuple(depths[i] for i in index), paths, host_paths
        )


def needs_paths(seqs: Iterable[SequenceView]) -> bool:
    """Whether a distribution of these sequences depends on the drafted tokens of its path other
    than through the logits: penalties or a grammar."""
    return any(seq.params.penalises or seq.constraint is not None for seq in seqs)


def is_unadjusted(seq: SequenceView) -> bool:
    """Whether ``adjust_logits`` changes nothing for this sequence, at any depth: it has no bias,
    penalties, grammar or unmet ``min_tokens``."""
    return seq.constraint is None and _is_unadjusted_by_params(seq)


def _is_unadjusted_by_params(seq: SequenceView) -> bool:
    """``is_unadjusted``, except that the sequence may have a grammar."""
    params = seq.params
    if params.logit_bias or params.penalises:
        return False
    return not params.min_tokens or seq.generated >= params.min_tokens


def is_argmax(seq: SequenceView) -> bool:
    """Whether the sequence's next token is the argmax of the model's logits, at any depth."""
    return seq.params.greedy and is_unadjusted(seq)


def needs_logits(seqs: Iterable[SequenceView]) -> bool:
    """Whether any of these sequences needs more than the argmax of its rows."""
    return any(
        seq.params.logprobs is not None or seq.params.logits_processors or not is_argmax(seq)
        for seq in seqs
    )


def probabilities(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """float32 ``[R, V]``: the distribution of each row, from logits ``[R, V]`` of any dtype. With
    temperature 0 it is one-hot on the lowest id among the largest scores."""
    return scores_to_probs(adjust_logits(logits, rows), [seq.params for seq in rows.seqs])


# --- logits processors, bias, min_tokens ----------------------------------------------


def apply_logits_processors(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``[R, V]``: logits after the requests' ``logits_processors``; the input itself if there are
    none. Drafters do not apply them, as the verifier decides in the end. Raises ConfigError if a
    processor returns anything but a row of logits."""
    if not any(seq.params.logits_processors for seq in rows.seqs):
        return logits
    scores = logits.to(torch.float32, copy=True)
    for row, (seq, path) in enumerate(zip(rows.seqs, rows.on_host, strict=True)):
        prompt, output = seq.tokens[: seq.prompt_length], seq.tokens[seq.prompt_length :]
        for processor in seq.params.logits_processors:
            prompts = [prompt] if len(signature(processor).parameters) == 3 else []
            result = processor(*prompts, [*output, *path], scores[row])
            if getattr(result, "shape", None) != scores[row].shape:
                raise ConfigError(f"a logits processor returned {result!r}; return its logits")
            scores[row] = result
    return scores


def adjust_logits(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """float32 ``[R, V]``: logits after logit_bias, min_tokens, penalties and grammars; the input
    itself if it is float32 and none of these applies."""
    scores = logits.to(torch.float32)
    seqs = {id(seq): seq for seq in rows.seqs}.values()
    biased = any(seq.params.logit_bias for seq in seqs)
    too_short = any(seq.generated < seq.params.min_tokens for seq in seqs)
    if (biased or too_short) and scores is logits:
        scores = scores.clone()
    if biased:
        _apply_logit_bias(scores, rows)
    if too_short:
        _apply_min_tokens(scores, rows)
    if any(seq.params.penalises for seq in seqs):
        scores = apply_penalties(scores, rows)
    if any(seq.constraint is not None for seq in seqs):
        scores = apply_grammars(scores, rows)
    return scores


def _apply_logit_bias(scores: torch.Tensor, rows: Rows) -> None:
    width = scores.shape[1]
    entries = [
        (row, token, bias)
        for row, seq in enumerate(rows.seqs)
        for token, bias in seq.params.logit_bias.items()
        if 0 <= token < width
    ]
    if entries:
        at, tokens, biases = zip(*entries, strict=True)
        index = to_device([at, tokens], scores.device)
        values = to_device(biases, scores.device, torch.float32)
        scores.index_put_((index[0], index[1]), values, accumulate=True)


def _apply_min_tokens(scores: torch.Tensor, rows: Rows) -> None:
    """Forbid stop ids, in place, in rows before ``min_tokens`` tokens."""
    width = scores.shape[1]
    forbidden = [
        (row, token)
        for row, (seq, depth) in enumerate(zip(rows.seqs, rows.depths, strict=True))
        if seq.generated + depth < seq.params.min_tokens
        for token in seq.stop_ids
        if token < width
    ]
    if forbidden:
        index = to_device(forbidden, scores.device)
        scores[index[:, 0], index[:, 1]] = -torch.inf


def apply_grammars(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """float32 ``[R, V]``: scores with minus infinity where the row's grammar forbids the token.
    Waits for the device unless the host knows the drafted tokens."""
    constrained: list[int] = []
    masks: list[torch.Tensor] = []
    for row, (seq, path) in enumerate(zip(rows.seqs, rows.on_host, strict=True)):
        allowed = None if seq.constraint is None else seq.constraint.allowed_tokens(path)
        if allowed is not None:
            constrained.append(row)
            # Padding of the logits beyond the vocabulary is forbidden as well.
            masks.append(torch.nn.functional.pad(allowed, (0, scores.shape[1] - len(allowed))))
    if not masks:
        return scores
    forbidden = ~upload(torch.stack(masks), scores.device)
    if len(masks) == len(scores):
        return scores.masked_fill(forbidden, -torch.inf)
    index = to_device(constrained, scores.device)
    masked = scores.index_select(0, index).masked_fill(forbidden, -torch.inf)
    return scores.index_copy(0, index, masked)


# --- penalties ------------------------------------------------------------------------------------
# Only tokens that occur are penalised: a text has about a thousand different ones, a vocabulary
# 50,000 to 200,000. So their scores are gathered, changed and scattered back.


def apply_penalties(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """float32 ``[R, V]``: scores after the repetition penalty (for tokens of prompt and output) and
    presence and frequency penalties (output only). Drafted tokens on the path count as output."""
    distinct = list({id(seq): seq for seq in rows.seqs}.values())
    ids, counts = _count_tables(distinct, scores)
    index = {id(seq): i for i, seq in enumerate(distinct)}
    of_row = to_device([index[id(seq)] for seq in rows.seqs], scores.device)
    ids, counts = ids[of_row], counts[of_row]
    if rows.paths is not None and rows.paths.shape[1]:
        ids, counts = _add_path_counts(ids, counts, rows.paths, rows.depths)
    params = [seq.params for seq in rows.seqs]
    repetition = param_column(params, lambda p: p.repetition_penalty, scores.device)
    frequency = param_column(params, lambda p: p.frequency_penalty, scores.device)
    presence = param_column(params, lambda p: p.presence_penalty, scores.device)
    penalized = scores.gather(1, ids)
    discouraged = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized = torch.where(counts >= 0, discouraged, penalized)
    counts = counts.clamp(min=0)
    # Repeated ids have equal values.
    return scores.scatter(1, ids, penalized - frequency * counts - presence * (counts > 0))


def _count_tables(
    distinct: list[SequenceView], scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sequence the token ids that occur, int64 [S, U], and how often in the output,
    float32 [S, U]: 0 means in the prompt only, -1 nowhere (padding)."""
    of_seqs = [_occurrences(seq, scores.shape[1]) for seq in distinct]
    longest = max(1, *(len(ids) for ids, _ in of_seqs))
    ids = np.zeros((len(of_seqs), longest), dtype=np.int64)
    counts = np.full((len(of_seqs), longest), -1, dtype=np.float32)
    for row, (token_ids, times) in enumerate(of_seqs):
        if len(token_ids):  # rows are padded with their first entry
            ids[row], counts[row] = token_ids[0], times[0]
            ids[row, : len(token_ids)], counts[row, : len(token_ids)] = token_ids, times
    device = scores.device
    return upload(torch.from_numpy(ids), device), upload(torch.from_numpy(counts), device)


def _occurrences(
    seq: SequenceView, width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids below ``width`` that occur, and how often in the output (0: in the prompt only)."""
    tokens = seq.tokens
    counter = tokens.occurrences if isinstance(tokens, TokenView) else Occurrences()
    count_of = counter.count(tokens, seq.prompt_length)
    ids, counts = (
        np.fromiter(numbers, np.int64, len(count_of)) for numbers in (count_of, count_of.values())
    )
    return ids[ids < width], counts[ids < width]


def _add_path_counts(
    ids: torch.Tensor, counts: torch.Tensor, paths: torch.Tensor, depths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Extend the tables [R, U] by the tokens of each row's path, to [R, U + D]."""
    limit = to_device(list(depths), paths.device).unsqueeze(1)
    on_path = torch.arange(paths.shape[1], device=paths.device) < limit
    # Entries beyond the path are replaced by the row's first id.
    tokens = torch.where(on_path, paths, ids[:, :1])
    same = ids.unsqueeze(1) == tokens.unsqueeze(2)  # [R, D, U]
    known = torch.where(same, counts.unsqueeze(1), -1.0).amax(-1)
    ids, counts = torch.cat((ids, tokens), 1), torch.cat((counts, known), 1)
    times = ((ids.unsqueeze(1) == paths.unsqueeze(2)) & on_path.unsqueeze(2)).sum(1)
    return ids, torch.where(times > 0, counts.clamp(min=0) + times, counts)


# --- temperature and truncation ------------------------------------------------------------------


def greedy_choice(scores: torch.Tensor) -> torch.Tensor:
    """int64 [R]: argmax of each row, the lowest id among equals; NO_TOKEN if it is not finite."""
    best, tokens = row_max(scores)
    return torch.where(best.abs() < torch.inf, tokens, NO_TOKEN)


def greedy_tokens(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """int64 [R]: ``greedy_choice`` of the adjusted logits. On a CPU a grammar is first asked
    whether it allows the argmax, which takes less time than making the mask of allowed tokens."""
    distinct = {id(seq): seq for seq in rows.seqs}.values()
    constrained = any(seq.constraint is not None for seq in distinct)
    if not constrained or logits.is_cuda or not all(map(_is_unadjusted_by_params, distinct)):
        return greedy_choice(adjust_logits(logits, rows))
    choices = greedy_choice(logits)
    items = zip(rows.seqs, rows.on_host, choices.tolist(), strict=True)
    refused = [
        row
        for row, (seq, path, token) in enumerate(items)
        if seq.constraint is not None and not seq.constraint.is_allowed(path, token)
    ]
    if refused:
        index = to_device(refused, logits.device)
        choices[index] = greedy_choice(adjust_logits(logits[index], rows.select(refused)))
    return choices


def one_hot(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [R, width]: one-hot rows for ``tokens`` [R]; all zeros for NO_TOKEN."""
    probs = torch.zeros(tokens.shape[0], width, device=tokens.device)
    index = tokens.unsqueeze(1)
    return probs.scatter_(1, index.clamp(min=0), (index >= 0).to(probs.dtype))


def _inverse_temperature(params: SamplingParams) -> float:
    if params.greedy:
        return 1.0  # the row is replaced by a one-hot distribution later
    return min(1.0 / max(params.temperature, 1e-300), _MAX_INVERSE_TEMPERATURE)


def scores_to_probs(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """float32 [R, V]: the distribution of each row of adjusted logits [R, V] after temperature,
    min_p, top_k and top_p. A row without a distribution (NaN, infinite, all tokens forbidden) gives
    NaN, or zeros if greedy."""
    width = scores.shape[1]
    if all(p.greedy for p in params):
        return one_hot(greedy_choice(scores), width)
    probs = torch.softmax(_apply_temperature(scores, params), dim=-1)
    if any(p.truncates for p in params):
        probs = truncate(probs, params)
    if any(p.greedy for p in params):
        one_hots = one_hot(greedy_choice(scores), width)
        greedy = param_column(params, lambda p: p.greedy, scores.device, torch.bool)
        probs = torch.where(greedy, one_hots, probs)
    return probs


def _apply_temperature(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Scores divided by the temperatures; finite wherever the scores are."""
    same = all(p is params[0] for p in params)
    inverses = [_inverse_temperature(p) for p in (params[:1] if same else params)]
    if max(inverses) > _LARGE_INVERSE_TEMPERATURE:
        # Subtracting the row's maximum leaves the distribution as it is and keeps the product
        # finite. Rows with larger temperatures keep their bits.
        cold = [inverse > _LARGE_INVERSE_TEMPERATURE for inverse in inverses]
        is_cold = to_device(cold, scores.device, torch.bool).unsqueeze(1)
        scores = scores - torch.where(is_cold, scores.amax(dim=-1, keepdim=True), 0.0)
    if same:
        return scores if inverses[0] == 1.0 else scores * inverses[0]
    return scores * to_device(inverses, scores.device, torch.float32).unsqueeze(1)
