"""From requests to ``SamplingParams``, and a conversation of any of the three APIs: its prompt, its
ticket, and the reader of its answer.

an API's body --> ChatRequest --> Dialogue.begin --> ticket --> events
                                 reader() turns the text of events into deltas --> the API
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from paceline.core.params import Grammar, SamplingParams, shown
from paceline.errors import PromptError
from paceline.model.tokenizer import Tokenizer
from paceline.request.options import SamplingDefaults
from paceline.request.validation import apply_template
from paceline.server.api.protocol import (
    ChatMessage,
    ChatRequest,
    Generation,
    Speculation,
    StructuredOutputs,
    Tool,
)
from paceline.server.api.tools import AnswerStream, ForcedCall, PossibleCall, forced_grammar
from paceline.server.failures import APIError, check_text
from paceline.server.requestlog import note
from paceline.server.wire import Facts

if TYPE_CHECKING:
    from paceline.server.client import Ticket
    from paceline.server.service import Service


PREDICTED_LENGTH = 16  # tokens drafted a step for a request that predicts its answer
_MOST_DIGITS = 12  # of a token id
# Fields of requests that are parameters of the same name.
_SAME_NAMED = (
    *("presence_penalty", "frequency_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "priority", "n", "receipt"),
)
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMS = ("response_format", "structured_outputs", *_GUIDED)  # fields that give the text a form


@dataclass(frozen=True)
class Dialogue:
    """``prompt``: the conversation's token ids."""

    service: Service
    body: ChatRequest
    prompt: list[int]
    ticket: Ticket

    @classmethod
    async def begin(cls, service: Service, body: ChatRequest) -> Dialogue:
        """Submit a request. Raises APIError and what ``Service.submit`` does."""
        adapter = service.check_model(body.model)
        prompt = await asyncio.to_thread(render_request, service.tokenizer, body)
        remaining = service.remaining(len(prompt), "messages")
        limit = body.max_completion_tokens or body.max_tokens or remaining
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar, visible = forced_grammar(body), bool(body.shown_tools)
        params = sampling_params(body, service.facts, limit, logprobs, grammar, visible)
        if body.prediction is not None and params.drafter != "none":
            expected = await service.encode(body.prediction.content, False, "prediction")
            length = PREDICTED_LENGTH if params.draft_length is None else params.draft_length
            params = replace(params, prediction=tuple(expected), draft_length=length)
        params = replace(params, lora=adapter)
        ticket = await service.submit([prompt], params, body.deadline, body.stream)
        return cls(service, body, prompt, ticket)

    def reader(self) -> AnswerStream:
        """A reader of one choice's text."""
        tools, choice = self.body.shown_tools, self.body.tool_choice
        if not tools:
            return AnswerStream()
        if choice in (None, "auto"):
            parallel = self.body.parallel_tool_calls is not False and not self.body.functions
            return PossibleCall(tools, parallel)
        return ForcedCall(list(self.body.callable_tools))


_INSTRUCTION = (
    "You may call functions. To call one, answer with nothing but JSON of the form "
    '{"name": NAME, "arguments": {...}}. The functions:'
)
# Fields of a request that become template variables, if the template uses them.
_TEMPLATE_FIELDS = ("reasoning_effort", "verbosity")


def render_request(tokenizer: Tokenizer, body: ChatRequest) -> list[int]:
    """Token ids of a request's conversation. Raises APIError."""
    variables = dict(body.chat_template_kwargs)
    template = _template_of(tokenizer)
    for name in _TEMPLATE_FIELDS:
        value = getattr(body, name)
        if value is not None and name in template:
            variables.setdefault(name, value)
        elif value is not None:
            note(name)
    opens, continues = body.add_generation_prompt, body.continues
    return render(tokenizer, body.messages, body.shown_tools, variables, opens, continues)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    variables: dict[str, Any] | None = None,
    opens: bool = True,
    continues: bool = False,
) -> list[int]:
    """Token ids of a conversation. ``opens`` appends the start of an answer; ``continues`` leaves
    the last message open. ``variables`` are the template's. A template without tools gets them
    described in a system message. Raises APIError."""
    for number, message in enumerate(messages):
        check_text(message.text(), f"messages.{number}.content")
    template = _template_of(tokenizer)
    if not template:
        raise APIError(
            "this model has no chat template; use /v1/completions", code="no_chat_template"
        )
    knows_tools, knows_thoughts = "tools" in template, "reasoning_content" in template
    rendered = [_message(message, knows_tools, knows_thoughts) for message in messages]
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    options = _checked(tokenizer, variables or {})
    if described and knows_tools:
        options["tools"] = described
    elif described:
        rendered = _with_instruction(rendered, described)
    try:
        return apply_template(
            tokenizer,
            rendered,
            add_generation_prompt=opens and not continues,
            continue_final_message=continues,
            **options,
        )
    except PromptError as error:
        raise APIError(str(error), param="messages") from None


def _template_of(tokenizer: Tokenizer) -> str:
    return str(tokenizer.chat_template or "")


def _checked(tokenizer: Tokenizer, variables: dict[str, Any]) -> dict[str, Any]:
    """The variables. Raises APIError for names of ``apply_chat_template``'s parameters."""
    taken = signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in taken or name in ("messages", "self"):
            raise APIError(
                f"chat_template_kwargs: {name!r:.80} is not a variable of the chat template",
                param="chat_template_kwargs",
            )
    return dict(variables)


def _message(message: ChatMessage, knows_tools: bool, knows_thoughts: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text()}
    if message.name is not None:
        shown["name"] = message.name
    if message.reasoning_content is not None and knows_thoughts:
        shown["reasoning_content"] = message.reasoning_content
    calls = message.tool_calls or []
    functions = [
        {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        for call in calls
    ]
    if knows_tools:
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if functions:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return shown
    if role == "tool":  # unknown to templates without tools
        return {"role": "user", "content": f"Result of the call: {message.text()}"}
    shown["content"] = "\n".join(filter(None, [message.text(), *map(json.dumps, functions)]))
    return shown


def _arguments(text: str) -> Any:
    """Templates want the arguments as an object; other text stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_instruction(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"]) for tool in tools)
    text = f"{_INSTRUCTION}\n{functions}"
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# -- parameters ------------------------------------------------------------------------------------


def sampling_params(
    request: Generation,
    facts: Facts,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    visible: bool = False,
) -> SamplingParams:
    """``facts`` names the loaded drafters and the sampling defaults; ``grammar`` is that of a
    forced tool call. ``visible``: special tokens are part of the text, as they mark calls. As in
    OpenAI and vLLM, seed -1 is no seed and top_p 0 is greedy. Raises APIError and ConfigError."""
    speculation = request.speculation or Speculation()
    text_form = _grammar(request)
    if grammar is not None and text_form is not None:  # beside a forced call there is no text
        for name in _FORMS:
            if getattr(request, name) is not None:
                note(name)
    return SamplingParams(
        **sampling_of(request, facts.sampling),
        **{name: getattr(request, name) for name in _SAME_NAMED},
        logit_bias=_biases(request.logit_bias or {}),
        seed=None if request.seed in (None, -1) else request.seed % 2**63,
        max_tokens=max_tokens,
        logprobs=0 if logprobs is None and speculation.tokens else logprobs,
        include_stop_str_in_output=request.include_stop_str_in_output,
        drafter=_drafter(speculation.drafter, facts.drafters),
        draft_length=speculation.draft_length,
        skip_special_tokens=request.skip_special_tokens and not visible,
        skip_end_tokens=request.skip_special_tokens,
        grammar=grammar or text_form,
    )


def sampling_of(request: Generation, defaults: SamplingDefaults) -> dict[str, Any]:
    """Temperature, truncation and repetition penalty of a request. Raises ConfigError."""
    asked = SamplingDefaults(
        request.temperature,
        request.top_p or (None if request.top_p is None else 1.0),
        1 if request.top_p == 0 else request.top_k,
        request.min_p,
        request.repetition_penalty,
    )
    return asked.over(defaults).filled()


def _biases(logit_bias: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in logit_bias.items():
        if not token.isdecimal() or len(token) > _MOST_DIGITS:
            raise APIError(f"logit_bias: {shown(token)} is not a token id", param="logit_bias")
        if not -100 <= bias <= 100:
            raise APIError(
                f"logit_bias: {bias} for token {token} is not from -100 to 100", param="logit_bias"
            )
        biases[int(token)] = bias
    return biases


def _drafter(name: str, drafters: tuple[str, ...]) -> str | None:
    if name == "auto":
        return None
    if name in ("none", "off"):  # the latter as before 0.2.0
        return "none"
    if name not in drafters:
        offered = ", ".join(dict.fromkeys(("auto", "none", *drafters)))
        raise APIError(
            f"speculation.drafter {name!r} is not loaded; use one of {offered}",
            param="speculation.drafter",
        )
    return name


def _grammar(request: Generation) -> Grammar | None:
    """The grammar that one of several fields asks for. Raises APIError if two do."""
    asked, form = request.structured_outputs or StructuredOutputs(), request.response_format
    schema = None if form is None or form.json_schema is None else form.json_schema.schema_
    choices = [choice for choice in (asked.choice, request.guided_choice) if choice is not None]
    regexes = [asked.regex, request.guided_regex]
    regexes += ["|".join(map(re.escape, choice)) for choice in choices]
    objects = [asked.json_object, form is not None and form.type == "json_object"]
    grammars = [
        *(Grammar.json() for wanted in objects if wanted),
        *(_json(s) for s in (asked.json_, request.guided_json, schema) if s is not None),
        *(Grammar("regex", regex) for regex in regexes if regex is not None),
        *(Grammar("lark", g) for g in (asked.grammar, request.guided_grammar) if g is not None),
    ]
    if len(grammars) > 1:
        raise APIError(
            "the text is given several forms; give one of response_format and structured_outputs",
            param="structured_outputs",
        )
    return grammars[0] if grammars else None


def _json(schema: dict[str, Any] | str) -> Grammar:
    return Grammar("json", schema if isinstance(schema, str) else json.dumps(schema))
