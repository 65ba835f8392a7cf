"""Chat requests of all three chat APIs: rendering the prompt, sampling parameters, submission.

body of an API --> ChatRequest --> SubmittedChat.submit --> ticket --> events
                            new_parser(): text of events --> deltas --> answer in the API's format
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

from paceline.core.params import Grammar, SamplingParams
from paceline.errors import PromptError
from paceline.model.tokenizer import Tokenizer
from paceline.request.options import SamplingDefaults
from paceline.request.validation import apply_template
from paceline.server.api import protocol
from paceline.server.api.reasoning import Marks
from paceline.server.api.tools import (
    THOUGHT,
    ForcedCallParser,
    TextParser,
    ToolCallParser,
    forced_grammar,
)
from paceline.server.client import Ticket
from paceline.server.failures import APIError, check_text
from paceline.server.service import Service

PREDICTED_LENGTH = 16  # draft tokens per step for a request with a predicted output
_END_OF_PROMPT = 16  # tokens in which a template may begin the thoughts
# Request fields that are fields of SamplingParams by the same name.
_SAME_NAMED = (
    *("presence_penalty", "frequency_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "priority", "n", "receipt", "include_stop_str_in_output"),
)


@dataclass(frozen=True)
class SubmittedChat:
    """A chat request with the token ids of its prompt and the ticket of its engine requests.
    ``marks`` separate thoughts from text; None: nothing is separated."""

    service: Service
    body: protocol.ChatRequest
    prompt: list[int]
    ticket: Ticket
    marks: Marks | None

    @classmethod
    async def submit(cls, service: Service, body: protocol.ChatRequest) -> SubmittedChat:
        """Render the prompt and submit it. Raises APIError and what ``Service.submit`` raises."""
        service.check_model(body.model)
        prompt = await asyncio.to_thread(render, service.tokenizer, body)
        remaining = service.remaining(len(prompt), "messages")
        limit = body.max_completion_tokens or body.max_tokens or remaining
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = forced_grammar(body)
        marks = Marks.of(service.tokenizer) if body.separate_reasoning else None
        # Calls and thoughts may be marked by special tokens.
        marked = bool(body.shown_tools) or (marks is not None and marks.special)
        params = sampling_params(body, service.facts.sampling, limit, logprobs, grammar, marked)
        if body.prediction is not None and params.drafter != "none":
            expected = await service.encode(body.prediction.content, False, "prediction")
            length = PREDICTED_LENGTH if params.draft_length is None else params.draft_length
            params = replace(params, prediction=tuple(expected), draft_length=length)
        return cls(service, body, prompt, await service.submit(body, [prompt], params), marks)

    def new_parser(self) -> TextParser:
        """A parser for the text of one choice."""
        tools, choice = self.body.shown_tools, self.body.tool_choice
        parser = TextParser()
        if tools and choice not in (None, "auto"):
            return ForcedCallParser()
        if tools:
            parser = ToolCallParser(tools, self.body.parallel_tool_calls is not False)
        if self.marks is not None:
            # Where a grammar rules the text, the model does not think first.
            free = self.ticket.params.grammar is None
            end = self.service.tokenizer.decode(self.prompt[-_END_OF_PROMPT:]) if free else ""
            functions = {tool.function.name for tool in tools}
            parser = self.marks.parser(parser, str(end), functions)
            parser.shows_thoughts = self.body.include_reasoning
        return parser

    def reasoning_tokens(self, parser: TextParser) -> int:
        """How many tokens the thoughts of a choice, parsed by ``parser``, have."""
        return len(self.service.tokenizer.encode(parser.thoughts, add_special_tokens=False))


_INSTRUCTION = (
    "You may call functions. To call one, answer with nothing but JSON of the form "
    '{"name": NAME, "arguments": {...}}. The functions:'
)
# Request fields that become variables of the chat template, if the template uses them.
_TEMPLATE_FIELDS = ("reasoning_effort", "verbosity")


def render(tokenizer: Tokenizer, body: protocol.ChatRequest) -> list[int]:
    """The token ids of a request's conversation, by the model's chat template. If the template does
    not support tools, a system message describes them. Raises APIError."""
    for number, message in enumerate(body.messages):
        check_text(message.text(), f"messages.{number}.content")
    template = str(tokenizer.chat_template or "")
    if not template:
        raise APIError(
            "this model has no chat template; use /v1/completions", code="no_chat_template"
        )
    options = _template_variables(tokenizer, template, body)
    with_tools = "tools" in template
    thought = next((name for name in (THOUGHT, "thinking") if name in template), None)
    inputs = [_template_message(message, with_tools, thought) for message in body.messages]
    tool_fields = [tool.model_dump(exclude_none=True) for tool in body.shown_tools]
    if tool_fields and with_tools:
        options["tools"] = tool_fields
    elif tool_fields:
        functions = "\n".join(json.dumps(tool["function"]) for tool in tool_fields)
        if inputs[0]["role"] == "system":
            inputs[0]["content"] += f"\n\n{_INSTRUCTION}\n{functions}"
        else:
            inputs.insert(0, {"role": "system", "content": f"{_INSTRUCTION}\n{functions}"})
    options["add_generation_prompt"] = body.add_generation_prompt and not body.continues
    try:
        return apply_template(tokenizer, inputs, continue_final_message=body.continues, **options)
    except PromptError as error:
        raise APIError(str(error), param="messages") from None


def _template_variables(
    tokenizer: Tokenizer, template: str, body: protocol.ChatRequest
) -> dict[str, Any]:
    """The request's variables for the chat template. Raises APIError."""
    reserved = {*signature(tokenizer.apply_chat_template).parameters, "messages", "self"}
    for name in filter(reserved.__contains__, body.chat_template_kwargs):
        raise APIError(
            f"chat_template_kwargs: {name!r:.80} is not a variable of the chat template",
            param="chat_template_kwargs",
        )
    variables = dict(body.chat_template_kwargs)
    for name in _TEMPLATE_FIELDS:
        value = getattr(body, name)
        if value is not None and name in template:
            variables.setdefault(name, value)
    return variables


def _template_message(
    message: protocol.ChatMessage, with_tools: bool, thought: str | None
) -> dict[str, Any]:
    """A message as input of a chat template. Without tools, calls and results become plain text.
    ``thought``: the template's field for thoughts."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text()}
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning_content is not None and thought is not None:
        fields[thought] = message.reasoning_content
    calls = message.tool_calls or []
    functions = [
        {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)}
        for call in calls
    ]
    if with_tools:
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if functions:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return fields
    if role == "tool":  # such templates do not know this role
        return {"role": "user", "content": f"Result of the call: {message.text()}"}
    fields["content"] = "\n".join(filter(None, [message.text(), *map(json.dumps, functions)]))
    return fields


def parse_arguments(text: str) -> Any:
    """The arguments of a call as an object, or as text if they are not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# -- parameters ------------------------------------------------------------------------------------


def sampling_params(
    request: protocol.Generation,
    defaults: SamplingDefaults,
    max_tokens: int,
    logprobs: int | None,
    call_grammar: Grammar | None = None,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """The sampling parameters of a request. ``call_grammar`` is the grammar of a forced tool call;
    it replaces the request's own, as there is no other text. ``keep_special_tokens`` leaves special
    tokens in the text, since they may mark tool calls. As in OpenAI and vLLM, seed -1 means no seed
    and top_p 0 greedy decoding. Raises APIError and ConfigError."""
    speculation = request.speculation or protocol.Speculation()
    text_grammar = _text_grammar(request)
    return SamplingParams(
        **sampling_settings(request, defaults),
        **{name: getattr(request, name) for name in _SAME_NAMED},
        logit_bias=request.logit_bias or {},
        seed=None if request.seed in (None, -1) else request.seed % 2**63,
        max_tokens=max_tokens,
        logprobs=0 if logprobs is None and speculation.tokens else logprobs,
        drafter=None if speculation.drafter == "auto" else speculation.drafter,
        draft_length=speculation.draft_length,
        skip_special_tokens=request.skip_special_tokens and not keep_special_tokens,
        skip_end_tokens=request.skip_special_tokens,
        grammar=call_grammar or text_grammar,
    )


def sampling_settings(request: protocol.Generation, defaults: SamplingDefaults) -> dict[str, Any]:
    """Temperature, truncation and repetition penalty, or their defaults. Raises ConfigError."""
    requested = {item.name: getattr(request, item.name) for item in fields(SamplingDefaults)}
    if request.top_p == 0:  # greedy
        requested |= {"top_p": 1.0, "top_k": 1}
    return SamplingDefaults(**requested).over(defaults).filled()


def _text_grammar(request: protocol.Generation) -> Grammar | None:
    """The grammar of the text, which several fields can define. Raises APIError if two do."""
    structured = request.structured_outputs or protocol.StructuredOutputs()
    form = request.response_format
    schema = None if form is None or form.json_schema is None else form.json_schema.schema_
    json_objects = [structured.json_object, form is not None and form.type == "json_object"]
    grammars = [Grammar.json() for wanted in json_objects if wanted]
    if structured.choice is not None:
        grammars.append(Grammar("regex", "|".join(map(re.escape, structured.choice))))
    texts = (
        *(("json", structured.json_), ("json", schema)),
        *(("regex", structured.regex), ("lark", structured.grammar)),
    )
    for kind, text in texts:
        if text is not None:
            grammars.append(Grammar(kind, text if isinstance(text, str) else json.dumps(text)))
    if len(grammars) > 1:
        raise APIError(
            "several fields define the format of the text; give only one of response_format and "
            "structured_outputs",
            param="structured_outputs",
        )
    return grammars[0] if grammars else None
