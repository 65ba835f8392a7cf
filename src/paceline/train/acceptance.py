"""Held-out acceptance: how many draft tokens a greedy target accepts, on texts that it generated.

The text is known, so one forward that drafts at every position shows what the target would accept
there, and ``simulate_decoding`` counts the drafts that decoding would start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.sequence import Sums
from paceline.core.stages import stage
from paceline.files import FileStamp, write_files
from paceline.model.names import model_path, stamps_of
from paceline.train.configs import PromptSelection, TrainConfig
from paceline.train.prompts import load_file_prompts
from paceline.train.records import Source


@dataclass(frozen=True)
class AcceptanceCounts(Sums):
    """Counts over one or several texts. ``steps`` target steps committed ``tokens``, including the
    target's own. Draft position j was verified ``reached[j]`` times (all positions before it were
    accepted), and accepted ``accepted[j]`` times."""

    tokens: int = 0
    steps: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target step, including the target's own; 0 if nothing was measured."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """The share accepted at each position, of the drafts that reached it."""
        return tuple(a / n if n else 0.0 for a, n in zip(self.accepted, self.reached, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {"mean_accepted_length": self.mean_accepted_length, **asdict(self)}


def total(parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """The sum of the counts."""
    return sum(parts, AcceptanceCounts())


def simulate_decoding(matches: torch.Tensor, undrafted: int = 1) -> AcceptanceCounts:
    """Count the steps of decoding a text of n tokens, given ``matches`` bool ``[n, length]``.
    ``matches[i, j]`` says whether, in a draft made when token i is the next one, token j equals
    token i + j of the text (False beyond its end). A step at i accepts the leading matches, and the
    next one is at i + accepted + 1. Before that there are ``undrafted`` tokens of one step each: a
    head cannot draft the first token, whose step provides its features; a draft model can (0)."""
    count, length = matches.shape
    # The number of leading matches of each row: the running product is 1 up to the first miss.
    leading = matches.long().cumprod(1).sum(1).tolist()
    reached, accepted = [0] * length, [0] * length
    steps, start = undrafted, 0
    while start < count:
        taken = leading[start]
        for j in range(min(taken + 1, length, count - start)):
            reached[j] += 1
            accepted[j] += j < taken
        steps += 1
        start += taken + 1
    return AcceptanceCounts(undrafted + count, steps, tuple(reached), tuple(accepted))


def start_positions(text: torch.Tensor, prompt: int) -> slice:
    """The n positions of a text ``[T]`` from which a head may draft. A draft from t consists of
    tokens t + 2, t + 3, ...; the step of the prompt itself gives the token after the ``prompt``."""
    return slice(prompt - 1, max(prompt - 1, len(text) - 2))


def candidate_ranks(candidates: torch.Tensor, text: torch.Tensor, rows: slice) -> torch.Tensor:
    """The rank of the text's tokens among the candidates ``[n, length, k]`` of drafts from
    ``rows``. Returns int64 ``[n, length]``: k for a token that is not among them, -1 beyond the end
    of the text. ``ranks == 0`` are the ``matches`` of ``simulate_decoding``."""
    count, length, k = candidates.shape
    index_ahead = torch.arange(2, 2 + length, device=text.device)
    wanted = torch.arange(rows.start, rows.start + count, device=text.device)[:, None] + index_ahead
    right = candidates == text[wanted.clamp(max=len(text) - 1)][..., None]
    ranks = torch.where(right.any(-1), right.long().argmax(-1), k)
    return torch.where(wanted < len(text), ranks, -1)


_MAX_PROMPT = 1024  # tokens of a held-out prompt: a request for a summary contains the text


@dataclass(frozen=True)
class HeldOutText:
    """A prompt of ``prompt`` tokens and the target's greedy continuation, in ``token_ids``."""

    source: str  # name of the validation file
    prompt: int
    token_ids: list[int]


def load_held_out_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sources: Sequence[Source],
    config: TrainConfig,
    cache: Path,
) -> list[HeldOutText]:
    """``held_out`` prompts of each validation file, continued by at most ``held_out_tokens``. They
    are generated once, and stored in the file ``cache`` for when the run is resumed."""
    count, max_tokens = config.held_out, config.held_out_tokens
    files = [str(FileStamp.of(source.path)) for source in sources]
    key: dict[str, Any] = {"model": config.model, "files": files}
    key["weights"] = str(stamps_of(model_path(config.model)))
    key |= {"count": count, "max_tokens": max_tokens, "exclude": [*config.exclude_licenses]}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or damaged
        saved = json.loads(cache.read_text(encoding="utf-8"))
        if saved["key"] == key:
            return msgspec.convert(saved["texts"], list[HeldOutText])
    texts: list[HeldOutText] = []
    room = max_context(target, _MAX_PROMPT + max_tokens) - max_tokens if sources else 0
    selection = PromptSelection(
        count,
        exclude_licenses=config.exclude_licenses,
        max_prompt_len=max(1, min(_MAX_PROMPT, room)),
    )
    for source in sources:
        loaded = load_file_prompts(source, tokenizer, selection, seed=(0,), any_turn=True)
        prompts = [prompt.token_ids for prompt in loaded]
        with stage(f"the target continues {len(prompts)} prompts of {source.path.name}"):
            continuations = continue_greedily(target, prompts, max_tokens)
        for prompt, ids in zip(prompts, continuations, strict=True):
            if len(ids) > 1:  # otherwise there is nothing to draft
                texts.append(HeldOutText(source.name, len(prompt), [*prompt, *ids]))
    content = json.dumps({"key": key, "texts": [asdict(text) for text in texts]})
    write_files({cache: content.encode()}, "the held-out texts")
    return texts


def max_context(model: Any, default: int) -> int:
    """The context length of a model; ``default`` if its configuration does not give it."""
    shape = model.config.get_text_config(decoder=True)
    return int(getattr(shape, "max_position_embeddings", None) or default)


@torch.no_grad()
def continue_greedily(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """The greedy continuation of each prompt, up to and including the end token."""
    device = target.device
    ends = target.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    # Padded on the left, so that all prompts end in the same column.
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side="left")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0}
    generated = target.generate(input_ids=ids, attention_mask=mask, **options)
    result = []
    for row in generated[:, ids.shape[1] :].tolist():
        end = next((i for i, token in enumerate(row, 1) if token in stops), len(row))
        result.append(row[:end])
    return result
