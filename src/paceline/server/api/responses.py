"""OpenAI's ``/v1/responses``. Responses are stored so that later requests can continue them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.server.api import blocks
from paceline.server.api.chat import SubmittedChat, sampling_settings
from paceline.server.api.responses_api import ResponsesRequest, messages_from_items
from paceline.server.errors import openai_body
from paceline.server.failures import APIError
from paceline.server.requestlog import new_id
from paceline.server.security import owner_of
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with

MAX_BYTES = 64 * 2**20  # of all stored responses
# Fields of a request that its response repeats.
_REPEATED_FIELDS = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning"),
    *("previous_response_id", "store", "tool_choice", "tools"),
}


def add_routes(app: FastAPI, service: Service) -> None:
    store = ResponseStore()

    def stored(owner: str, response_id: str, param: str) -> StoredResponse:
        """A stored response. Raises APIError 404."""
        response = store.get(owner, response_id)
        if response is None:
            raise APIError(
                f"{param}: there is no stored response {response_id[:80]!r}; send the whole "
                "conversation as input instead",
                404,
                param=param,
                code="response_not_found",
            )
        return response

    @app.post("/v1/responses", response_model=None)
    async def respond(body: ResponsesRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        owner = owner_of(http.scope)
        messages: list[blocks.MessageFields] = []
        if body.previous_response_id is not None:
            messages += stored(owner, body.previous_response_id, "previous_response_id").messages
        messages += messages_from_items(body.input, partial(store.item, owner))
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        chat = await SubmittedChat.submit(service, body.chat([*system, *messages]))
        answer = ResponsesAnswer(chat, body, messages, partial(store.add, owner))
        return await respond_with(answer, chat.ticket, http, body.stream)

    @app.get("/v1/responses/{name}")
    async def response(name: str, http: HTTPRequest) -> dict[str, Any]:
        return stored(owner_of(http.scope), name, "name").response

    @app.delete("/v1/responses/{name}")
    async def delete(name: str, http: HTTPRequest) -> dict[str, Any]:
        owner = owner_of(http.scope)
        identifier: str = stored(owner, name, "name").response["id"]
        store.remove(owner, identifier)
        return {"id": identifier, "object": "response", "deleted": True}


class ResponsesAnswer(blocks.BlocksAnswer):
    """A response whose output items are reasoning, messages with one text part, and function
    calls."""

    def __init__(
        self,
        chat: SubmittedChat,
        request: ResponsesRequest,
        messages: list[blocks.MessageFields],
        store: Callable[[StoredResponse], None],
    ) -> None:
        super().__init__(chat)
        self._request, self._messages, self._store = request, messages, store
        self._id = new_id("resp_")
        self._created = self._service.now()
        self._sequence_number = 0  # of the next event

    def _result(self) -> Chunk:
        response = self._response()
        if self._request.store and response["status"] != "in_progress":
            answered = messages_from_items(response["output"], lambda name: None)
            messages = [*self._messages, *answered]
            self._store(StoredResponse(messages, response))
        return response

    def _response(self) -> dict[str, Any]:
        request = self._request
        sampling = sampling_settings(request, self._service.facts.sampling)
        truncated = self._reason == "length"
        final_status = "incomplete" if truncated else "completed"
        format = request.text.format.model_dump(exclude_none=True, by_alias=True)
        if format["type"] != "json_schema":
            format = {"type": format["type"]}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if self._completion is None else final_status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "model": request.model or self._service.model,
            "output": list(map(self._item, self._blocks)),
            "temperature": sampling["temperature"],
            "text": {"format": format},
            "top_p": sampling["top_p"] if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            **request.model_dump(include=_REPEATED_FIELDS),
            **self.receipt,
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._completion is None:
            return None
        input_tokens, output_tokens = len(self._chat.prompt), len(self._completion.token_ids)
        return {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": self._completion.stats.cached_tokens},
            "output_tokens": output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._chat.reasoning_tokens(self._parser)
            },
            "total_tokens": input_tokens + output_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> Chunk:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}

    def _item_event(self, kind: str, block: blocks.AnswerBlock, **fields: Any) -> Chunk:
        position = {"item_id": self._item_id(block), "output_index": block.index}
        if not block.call_id:
            position["content_index"] = 0
        return self._event(kind, **position, **fields)

    def _first_events(self) -> Iterator[Chunk]:
        response = {**self._response(), "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=response)

    def final_chunks(self) -> list[Chunk]:
        response = self._result()
        return [self._event(f"response.{response['status']}", response=response)]

    def error_chunk(self, error: APIError) -> Chunk:
        body = openai_body(error)
        return self._event("error", **{**body["error"], "type": "error"}, **body)

    def _item_id(self, block: blocks.AnswerBlock) -> str:
        kind = "fc" if block.call_id else "rs" if block.is_thought else "msg"
        return f"{kind}_{self._id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: blocks.AnswerBlock) -> dict[str, Any]:
        kind = "function_call" if block.call_id else "message"
        item = {"id": self._item_id(block), "type": kind, "status": block.status}
        if block.is_thought:
            thought = {"type": "reasoning_text", "text": block.text}
            return {**item, "type": "reasoning", "summary": [], "content": [thought]}
        if not block.call_id:
            part = {"type": "output_text", "text": block.text, "annotations": []}
            content = [part | {"logprobs": block.logprobs}]
            return {**item, "role": "assistant", "content": content}
        namespace, tool = self._request.functions[block.name]
        return {
            **item,
            "call_id": block.call_id,
            **({} if namespace is None else {"namespace": namespace}),
            "name": tool.name,
            "arguments": block.text,
        }

    def _start_events(self, block: blocks.AnswerBlock) -> Iterator[Chunk]:
        item = self._item(block)
        added = item if block.call_id else item | {"content": []}
        yield self._event("response.output_item.added", output_index=block.index, item=added)
        for part in item.get("content", ()):
            yield self._item_event("response.content_part.added", block, part=part)

    def _delta_event(
        self, block: blocks.AnswerBlock, piece: str, logprobs: list[dict[str, Any]]
    ) -> Chunk:
        kind = _event_kind(block)
        fields: dict[str, Any] = {"delta": piece}
        if kind == "output_text":
            fields["logprobs"] = logprobs
        return self._item_event(f"response.{kind}.delta", block, **fields)

    def _end_events(self, block: blocks.AnswerBlock) -> Iterator[Chunk]:
        item, kind = self._item(block), _event_kind(block)
        done: dict[str, Any] = {"text": block.text}
        if kind == "function_call_arguments":
            done = {name: item[name] for name in ("name", "arguments")}
        elif kind == "output_text":
            done["logprobs"] = block.logprobs
        yield self._item_event(f"response.{kind}.done", block, **done)
        for part in item.get("content", ()):
            yield self._item_event("response.content_part.done", block, part=part)
        yield self._event("response.output_item.done", output_index=block.index, item=item)


def _event_kind(block: blocks.AnswerBlock) -> str:
    if block.call_id:
        return "function_call_arguments"
    return "reasoning_text" if block.is_thought else "output_text"


@dataclass(frozen=True)
class StoredResponse:
    """A response as the client got it, and the messages of the conversation up to its end."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    """Stores responses that later requests may continue, by owner (the API key; without keys there
    is one owner) and id. They are JSON in memory: their size is known, and they cannot be changed.
    Beyond ``MAX_BYTES`` in all the least recently used are dropped."""

    def __init__(self) -> None:
        self._stored: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.size = 0  # bytes

    def add(self, owner: str, stored: StoredResponse) -> None:
        """Store a response with a new id, unless it is larger than ``MAX_BYTES``."""
        # A client's text may have lone surrogates.
        text = json.dumps(vars(stored), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(text) > MAX_BYTES:
            return
        self._stored[owner, stored.response["id"]] = text
        self.size += len(text)
        while self.size > MAX_BYTES:
            self.remove(*next(iter(self._stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        if (owner, response_id) not in self._stored:
            return None
        self._stored.move_to_end((owner, response_id))
        return StoredResponse(**json.loads(self._stored[owner, response_id]))

    def remove(self, owner: str, response_id: str) -> None:
        self.size -= len(self._stored.pop((owner, response_id)))

    def item(self, owner: str, item_id: str) -> dict[str, Any] | None:
        """An output item of one of the owner's responses; its id contains the response's id."""
        stored = self.get(owner, f"resp_{item_id.partition('_')[2].partition('_')[0]}")
        output = [] if stored is None else stored.response["output"]
        return next((item for item in output if item["id"] == item_id), None)
