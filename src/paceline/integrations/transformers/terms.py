"""Translates a call of transformers' ``generate`` to sampling parameters, or refuses it.

At this point transformers has converted its configuration to lists of logits processors and
stopping criteria."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError

# Options that select another decoding mode or ask for outputs that are not kept, with advice.
_UNKNOWN_OPTIONS = {
    "output_scores": "run the model over the returned sequences for scores",
    "output_logits": "run the model over the returned sequences for logits",
    "output_attentions": "run the model over the returned sequences for attentions",
    "output_hidden_states": "run the model over the returned sequences for hidden states",
    "prompt_lookup_num_tokens": 'draft="ngram" looks up drafts in the prompt and the answer',
    "assistant_early_exit": 'draft="early_exit" drafts with the first layers',
    "use_mtp": "leave it out",
    "speculation_type": "leave it out and say draft=...",
    "assistant_ensemble_weight": "it is not lossless; leave it out",
    "cache_implementation": "the engine has its own paged cache; leave it out",
}
_HARMLESS = {"cache_implementation": ("dynamic",)}
# Model inputs that ``generate`` passes by itself. The cache is "cache" from transformers 5.24 on.
_CACHES = ("cache", "past_key_values")
_KNOWN_INPUTS = ("attention_mask", "position_ids", *_CACHES, "use_cache", "logits_to_keep")


def refuse(what: str, instead: str) -> ConfigError:
    return ConfigError(f"{what} is not supported by Paceline's decoding; {instead}")


@dataclass
class Terms:
    """The sampling parameters of all rows, without seeds. ``processors`` change the logits before
    sampling, ``criteria`` are checked after every token, ``stop_ids`` end a row."""

    params: SamplingParams
    stop_ids: frozenset[int]
    processors: Any = None
    criteria: list[Any] = field(default_factory=list)


def read_terms(
    config: Any, processors: Sequence[Any], criteria: Sequence[Any], length: int
) -> Terms:
    """Translate the lists of a call with prompts padded to ``length``. Raises ConfigError."""
    for name, instead in _UNKNOWN_OPTIONS.items():
        value = getattr(config, name, None)
        if value not in (None, False, *_HARMLESS.get(name, ())):
            raise refuse(f"{name}={value!r}", instead)
    mode = str(getattr(config.get_generation_mode(), "value", "")).replace("_", " ")
    if mode not in ("greedy search", "sample"):
        raise refuse(mode, "use greedy decoding or sampling (num_beams=1)")
    stop_ids: set[int] = set()
    max_length, other_criteria = config.max_length, []
    for criterion in criteria:
        if type(criterion) is stopping.EosTokenCriteria:
            stop_ids.update(int(token) for token in criterion.eos_token_id.flatten())
        elif type(criterion) is stopping.MaxLengthCriteria:
            max_length = min(max_length, int(criterion.max_length))
        else:
            other_criteria.append(criterion)
    max_tokens = max_length - length
    if max_tokens < 1:
        raise ConfigError(
            f"the prompt has {length} tokens and max_length is {config.max_length}, so nothing can "
            "be generated; raise max_new_tokens"
        )
    values, kept_processors = _as_params(processors), None
    if values is None:  # call the processors themselves, after every token of a draft, too
        values, kept_processors = {}, processing.LogitsProcessorList(processors)
    if not config.do_sample:
        values["temperature"] = 0.0
    values = {"temperature": 1.0} | values
    values["min_tokens"] = min(values.get("min_tokens", 0), max_tokens)
    params = SamplingParams(max_tokens=max_tokens, **values)
    return Terms(params, frozenset(stop_ids), kept_processors, other_criteria)


# Processors that correspond to a field of SamplingParams: the field, and the attribute with its
# value.
_NUMBERS: dict[type, tuple[str, str]] = {
    processing.TemperatureLogitsWarper: ("temperature", "temperature"),
    processing.TopKLogitsWarper: ("top_k", "top_k"),
    processing.TopPLogitsWarper: ("top_p", "top_p"),
    processing.MinPLogitsWarper: ("min_p", "min_p"),
    processing.MinNewTokensLengthLogitsProcessor: ("min_tokens", "min_new_tokens"),
    processing.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
}


def _as_params(processors: Sequence[Any]) -> dict[str, Any] | None:
    """The fields of SamplingParams that are equivalent to the processors, so that drafts are
    sampled by them, too; None if a processor has no equivalent, or if their order matters."""
    values: dict[str, Any] = {}
    for processor in processors:
        if type(processor) is processing.LogitNormalization:  # does not change the distribution
            continue
        ours, theirs = _NUMBERS.get(type(processor), ("", ""))
        ignores = getattr(processor, "prompt_ignore_length", None) is not None
        if not ours or ours in values or ignores:
            return None
        values[ours] = getattr(processor, theirs)
    both = values.get("min_p") and values.get("top_p", 1.0) < 1.0
    return None if both else values


def read_prompts(input_ids: torch.Tensor, inputs: dict[str, Any]) -> list[list[int]]:
    """The token ids of each row without padding, given the ``inputs`` for the model. Raises
    ConfigError for inputs that would give another result than the tokens alone."""
    for name, value in inputs.items():
        if value is not None and name not in _KNOWN_INPUTS:
            raise refuse(f"the model input {name}", "give input_ids and attention_mask only")
    for name in _CACHES:
        if (cache := inputs.get(name)) is not None and cache.get_seq_length() > 0:
            raise refuse(
                f"{name} of an earlier call",
                "leave it out; the engine's prefix cache is used instead",
            )
    mask = inputs.get("attention_mask")
    kept = torch.ones_like(input_ids) if mask is None else mask
    if kept.shape != input_ids.shape:
        raise ConfigError(
            f"the attention_mask has shape {list(kept.shape)} and input_ids "
            f"{list(input_ids.shape)}; both must have the same shape"
        )
    kept = kept.bool()
    if not bool(kept.any(-1).all()):
        raise ConfigError("the attention_mask hides a whole prompt; keep at least one token")
    if not bool(kept[:, -1].all()):
        raise ConfigError("a prompt is padded on the right; set tokenizer.padding_side = 'left'")
    positions = inputs.get("position_ids")
    if positions is not None:
        usual = kept.long().cumsum(-1) - 1
        given = positions.to(usual.device).expand_as(usual) if positions.dim() == 2 else None
        if given is None or bool((given != usual)[kept].any()):
            raise refuse("position_ids of your own", "leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, kept, strict=True)]


class CriteriaReader:
    """Checks stopping criteria after every token of one row, as transformers does. Criteria get
    only this row, ``[1, length]`` including padding, since the rows of a batch have different
    lengths here; scores are None. ``error`` is the exception that one of them raised."""

    def __init__(self, criteria: Sequence[Any], row: torch.Tensor, max_tokens: int) -> None:
        """``row`` int64 ``[length]`` is the padded prompt, ``max_tokens`` may follow."""
        self._criteria = criteria
        self._ids = torch.cat((row, row.new_zeros(max_tokens))).unsqueeze(0)
        self._length = row.shape[0]
        self.error: Exception | None = None

    def consume(self, tokens: Sequence[int]) -> int | None:
        for count, token in enumerate(tokens, 1):
            self._ids[0, self._length] = token
            self._length += 1
            ids = self._ids[:, : self._length]
            try:
                done = [bool(torch.as_tensor(check(ids, None)).any()) for check in self._criteria]
            except Exception as error:
                self.error = error
                raise
            if any(done):
                return count
        return None


class RowProcessor:
    """Runs logits processors of transformers on one row, as a logits processor of SamplingParams.
    ``error`` is the exception that one of them raised."""

    def __init__(self, processors: Any, rows: torch.Tensor, number: int) -> None:
        """``rows`` int64 ``[batch, length]`` are the padded prompts; this is row ``number``."""
        # PrefixConstrainedLogitsProcessor identifies a row by its index, so keep the rows before.
        self._processors, self._ids = processors, rows[: number + 1]
        self.error: Exception | None = None

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        tail = self._ids.new_tensor(output_ids).expand(len(self._ids), -1)
        scores = logits.expand(len(self._ids), -1).clone()
        try:
            processed: torch.Tensor = self._processors(torch.cat((self._ids, tail), 1), scores)
        except Exception as error:
            self.error = error
            raise
        return processed[-1]
