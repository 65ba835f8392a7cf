"""Request bodies of OpenAI's API, with fields that other servers and Paceline add."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from paceline.core.params import MAX_STOPS
from paceline.server.fields import Body, Content

MAX_CHOICES = 16  # n
MAX_LOGPROBS = 20
MAX_PROMPTS = 64


class StreamOptions(Body):
    """``continuous_usage_stats``: with ``include_usage``, every chunk has the counts so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    """How a request is drafted, a field of Paceline's. ``drafter`` (or ``method``) is "auto" (the
    server's default), "none" or the name of a loaded drafter; ``draft_length`` fixes the length.
    ``stats`` adds statistics to the answer, ``tokens`` the drafter of each token."""

    drafter: str = Field(default="auto", validation_alias=AliasChoices("drafter", "method"))
    draft_length: int | None = Field(default=None, ge=0, le=64)
    stats: bool = False
    tokens: bool = False


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class StructuredOutputs(Body):
    """A grammar for the text in one of several forms; a field of vLLM's."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _as_stop_list(stops: Any) -> Any:
    """The stop strings as a list; "" is no stop string. Raises ValueError."""
    if isinstance(stops, str):
        return [stops] if stops else []
    if not isinstance(stops, list):
        raise ValueError("give a text, or a list of texts")
    return stops


Stops = Annotated[
    list[str],
    BeforeValidator(_as_stop_list, json_schema_input_type=str | list[str]),
    Field(max_length=MAX_STOPS),
]


class Generation(Body):
    """Fields that all requests share. Without ``model`` the served model is used."""

    _format_name: str = PrivateAttr("response_format")
    model: str | None = Field(default=None, max_length=512)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stops = Field(default_factory=list)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] | None = Field(default=None, max_length=1024)
    response_format: ResponseFormat | None = None
    # beyond OpenAI
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    return_token_ids: bool = False
    request_id: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")
    structured_outputs: StructuredOutputs | None = None
    deadline: float | None = Field(default=None, gt=0)
    speculation: Speculation | None = None
    receipt: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true only")
        return self

    @property
    def grammar_field(self) -> str:
        """The field that defines the grammar of the text, for messages."""
        form = self.response_format
        return "structured_outputs" if form is None or form.type == "text" else self._format_name


def _as_prompt_list(value: Any) -> Any:
    """One or several prompts as a list of prompts. Raises ValueError."""
    prompts = value if isinstance(value, list) else [value]
    if prompts is value and value and type(value[0]) is int:
        prompts = [value]
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not ids and not isinstance(prompt, str):
            raise ValueError("give a text, a list of token ids, or a list of either")
    return prompts


_AnyPrompts = str | list[int] | list[str] | list[list[int]]
Prompts = Annotated[
    list[str | list[TokenId]],
    BeforeValidator(_as_prompt_list, json_schema_input_type=_AnyPrompts),
    Field(min_length=1, max_length=MAX_PROMPTS),
]


class CompletionRequest(Generation):
    prompt: Prompts
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True


# -- conversations ---------------------------------------------------------------------------------


class FunctionCall(Body):
    """A function call in a conversation; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: Annotated[
        str, BeforeValidator(lambda given: json.dumps(given) if isinstance(given, dict) else given)
    ] = "{}"


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message of a conversation. Unknown fields of an assistant's message are ignored.
    ``prefix``: the answer continues this message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    prefix: bool = False

    @model_validator(mode="before")
    @classmethod
    def _keep_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("role") != "assistant":
            return data
        if data.get("audio") is not None and not data.get("content"):
            raise ValueError("audio is not supported; send its transcript as content")
        if data.get("function_call") is not None and not data.get("tool_calls"):
            raise ValueError("function_call is not supported; send tool_calls")
        kept = {name: value for name, value in data.items() if name in cls.model_fields}
        if kept.get("reasoning_content") is None and isinstance(data.get("reasoning"), str):
            kept["reasoning_content"] = data["reasoning"]
        return kept

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def text(self) -> str:
        """The content as one string."""
        return self.content or self.refusal or ""


class FunctionDefinition(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class PredictedOutput(Body):
    """The probable text of the answer, used as a draft."""

    type: Literal["content"] = "content"
    content: Content


class ChatRequest(Generation):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictedOutput | None = None
    separate_reasoning: bool = True  # False: thoughts stay in the text
    include_reasoning: bool = True  # False: separated thoughts are left out
    # for the chat template
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = Field(default=None, max_length=64)
    verbosity: str | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true only")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and not self.callable_tools:
            raise ValueError("tool_choice names a function that is not among the tools")
        return self

    def with_format_name(self, name: str) -> ChatRequest:
        """This request, from an API in which ``response_format`` has another name."""
        self._format_name = name
        return self

    @property
    def grammar_field(self) -> str:
        forced = self.tool_choice not in (None, "none", "auto")
        return "tools" if forced else super().grammar_field

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the prompt describes and the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> dict[str, FunctionDefinition]:
        """The functions that a forced call may name."""
        functions = {tool.function.name: tool.function for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return {name: functions[name]} if name in functions else {}
        return functions

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.messages[-1]
        return self.continue_final_message or (last.role == "assistant" and last.prefix)


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]
