"""Validation of user input: prompts, parameters and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.params import EMPTY_PROMPT, SamplingParams, is_unicode, is_whole, shown
from paceline.errors import ConfigError, PromptError
from paceline.model.tokenizer import Tokenizer

Prompt = str | list[int]
Message = dict[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Make a list of one prompt or several; vLLM's dicts become their text or token ids, arrays and
    tensors become lists. Raises PromptError."""
    given: Any = _plain(prompts)
    items: list[Any] | None = [given] if isinstance(given, (str, dict)) else _listed(given)
    if items is None:
        raise PromptError(f"the prompts are {shown(given)}; give texts or lists of token ids")
    if not items:
        raise PromptError("no prompt was given")
    items = [_plain(_of_dict(item) if isinstance(item, dict) else item) for item in items]
    if is_whole(items[0]):
        return [items]
    for item in items:
        if not isinstance(item, (str, list)):
            raise PromptError(f"a prompt is {shown(item)}; give texts or lists of token ids")
    return items


def as_params(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts. Raises ConfigError."""
    if isinstance(params, SamplingParams):
        return [params] * count
    items = _listed(params)
    for item in [params] if items is None else items:
        if not isinstance(item, SamplingParams):
            raise ConfigError(f"the parameters are {shown(item)}; give SamplingParams")
    assert items is not None
    if len(items) != count:
        raise ConfigError(
            f"{len(items)} SamplingParams for {count} prompts; give one for all or one each"
        )
    return items


def _of_dict(prompt: Mapping[str, Any]) -> Any:
    """vLLM's ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; another dict is returned."""
    known = prompt.keys() <= {"prompt", "prompt_token_ids"}
    return prompt.get("prompt_token_ids", prompt.get("prompt", prompt)) if known else prompt


def _plain(value: Any) -> Any:
    """An array of numpy, or a tensor of torch, as a list or a number."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: Any) -> list[Any] | None:
    """The items of an iterable as a list; None if the value is text, a mapping or no iterable."""
    if isinstance(value, (bytes, bytearray, memoryview, Mapping)):
        return None
    if not isinstance(value, Iterable):
        return None
    return list(value)


@dataclass(frozen=True)
class ContextBudget:
    """The most tokens of a sequence, prompt and answer together: the model's ``positions`` and the
    ``cached`` tokens that the whole KV cache can hold."""

    model: str
    positions: int
    cached: int

    @property
    def limit(self) -> int:
        return min(self.positions, self.cached)

    def refusal(self, count: int) -> str | None:
        """The error message for a prompt of ``count`` tokens if it leaves no room to answer."""
        too_long = f"the prompt has {count} tokens, but {self.bounds}"
        return None if count < self.limit else too_long

    @property
    def bounds(self) -> str:
        """The limits in words, and what raises them."""
        setting = "kv_cache_memory" if self.cached < self.positions else "max_model_len, if set"
        return (
            f"with the answer {self.model} sees {self.positions} and the cache holds "
            f"{self.cached}; shorten the prompt or raise {setting}"
        )


def encode(
    tokenizer: Tokenizer, prompt: Prompt, width: int, context_budget: ContextBudget
) -> list[int]:
    """Token ids of a prompt (text or ids), all below ``width``. Raises PromptError."""
    if isinstance(prompt, str):
        if not is_unicode(prompt):
            raise PromptError(
                f"the prompt {shown(prompt)} has half a surrogate pair, which is no character; "
                "decode the text properly or leave that out"
            )
        tokens = list(tokenizer.encode(prompt))
    else:
        tokens = list(prompt)
    if not prompt or not tokens:
        raise PromptError(EMPTY_PROMPT)
    for token in tokens:
        if not is_whole(token):
            raise PromptError(f"a prompt has {shown(token)}, which is no token id; give ints")
        if not 0 <= token < width:
            outside = f"{shown(token)}, which is outside the vocabulary (0 to {width - 1})"
            raise PromptError(f"a prompt has the id {outside}; give ids of this model's tokenizer")
    refused = context_budget.refusal(len(tokens))
    if refused is not None:
        raise PromptError(refused)
    return tokens


def check_params(params: SamplingParams, known: int, width: int, drafters: Sequence[str]) -> None:
    """Check parameters against the model: the tokenizer has ``known`` ids, of which the first
    ``width`` have logits, and ``drafters`` are loaded. Raises ConfigError."""
    bad = [t for t in (*params.logit_bias, *params.stop_token_ids) if not 0 <= t < known]
    if bad:
        raise ConfigError(
            f"token id {shown(bad[0])} in logit_bias or stop_token_ids is not in the "
            f"vocabulary (0 to {known - 1})"
        )
    if params.drafter not in (None, "none", *drafters):
        raise ConfigError(
            f"drafter: {shown(params.drafter)} is not loaded; use one of "
            f"{', '.join(dict.fromkeys((*drafters, 'none')))}, or load it with draft=[...]"
        )
    if not all(0 <= token < width for token in params.prediction):
        raise ConfigError(f"prediction has ids outside the vocabulary (0 to {width - 1})")


def endings(
    params: SamplingParams, end_tokens: frozenset[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Ids that end a request, and those that have no text, even if special tokens have."""
    stops = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= end_tokens
    hidden = frozenset() if params.include_stop_str_in_output else stops
    return stops, hidden | (end_tokens if params.skip_end_tokens else frozenset())


def params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample ``index`` of a prompt: samples differ in their seeds."""
    if params.seed is None or not index:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """Make a list of one conversation or several. Raises PromptError."""
    items = None if isinstance(messages, str) else _listed(messages)
    if items is None:
        raise PromptError(
            f'the messages are {shown(messages)}; give a list of {{"role": ..., "content": ...}}'
        )
    many = bool(items) and not isinstance(items[0], dict)
    return items if many else [items]


# Types of message parts that are text, and of reasoning that clients send back.
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


def text_of(content: Any) -> str | None:
    """The text of a message's content, a string or a list of parts. Fields of parts other than
    their type and text are ignored. Raises ValueError."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("give a text, or a list of parts of type 'text'")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in THOUGHTS:
        return ""
    if not isinstance(kind, str) or kind not in _TEXTS:
        shown = f"of type {kind!r:.40}" if isinstance(kind, str) else "without a type"
        raise ValueError(f"a part {shown} is not supported; send parts of type 'text'")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise ValueError(f"a part of type {kind!r} has no {name!r}")
    return str(part[name])


def render_chat(tokenizer: Tokenizer, model: str, messages: Sequence[Message]) -> list[int]:
    """Render a conversation by the model's chat template to token ids. Raises PromptError."""
    items = [] if isinstance(messages, str) else _listed(messages) or []
    wrong = [item for item in items if not _is_message(item)]
    if wrong or not items:
        refused = shown(wrong[0] if wrong else messages)
        raise PromptError(f'a message is {refused}; give {{"role": "user", "content": "..."}}')
    if tokenizer.chat_template is None:
        raise PromptError(f"{model} has no chat template; use generate with a plain prompt")
    try:
        texts = [text_of(item.get("content")) for item in items]
    except ValueError as error:
        raise PromptError(f"a message's content: {error}") from None
    asked = [
        {**item, "content": text} if "content" in item else item
        for item, text in zip(items, texts, strict=True)
    ]
    return apply_template(tokenizer, asked, add_generation_prompt=True)


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and "role" in item and bool({"content", "tool_calls"} & {*item})


def apply_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Render messages by the tokenizer's chat template to token ids. Raises PromptError."""
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    except Exception as error:  # templates raise Jinja errors of any kind
        reason = " ".join(str(error).split())
        raise PromptError(f"the chat template refused the messages: {reason}") from None
    return [int(token) for token in ids]
