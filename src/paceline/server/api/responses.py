"""OpenAI's ``/v1/responses``; answers are stored, so that later requests can continue them."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.server.api import blocks
from paceline.server.api.chat import Dialogue, sampling_of
from paceline.server.api.responses_api import ResponsesRequest, messages_of
from paceline.server.errors import error_body
from paceline.server.failures import APIError
from paceline.server.requestlog import new_id
from paceline.server.security import owner_of
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with

MAX_BYTES = 64 * 2**20
# Fields of a request that its response repeats.
_REPEATED = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning"),
    *("previous_response_id", "store", "tool_choice", "tools"),
}


def add_routes(app: FastAPI, service: Service) -> None:
    store = ResponseStore()

    def kept(owner: str, name: str, param: str) -> KeptResponse:
        response = store.get(owner, name)
        if response is None:
            raise APIError(
                f"{param}: no response {name[:80]!r} is kept here; send the whole input instead",
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
            messages += kept(owner, body.previous_response_id, "previous_response_id").messages
        messages += messages_of(body.input, partial(store.item, owner))
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        dialogue = await Dialogue.begin(service, body.chat([*system, *messages]))
        answer = ResponsesAnswer(dialogue, body, messages, partial(store.keep, owner))
        return await respond_with(answer, dialogue.ticket, http, body.stream)

    @app.get("/v1/responses/{name}")
    async def response(name: str, http: HTTPRequest) -> dict[str, Any]:
        return kept(owner_of(http.scope), name, "name").shown

    @app.delete("/v1/responses/{name}")
    async def delete(name: str, http: HTTPRequest) -> dict[str, Any]:
        owner = owner_of(http.scope)
        identifier: str = kept(owner, name, "name").shown["id"]
        store.drop(owner, identifier)
        return {"id": identifier, "object": "response", "deleted": True}


class ResponsesAnswer(blocks.BlocksAnswer):
    """Output items: messages of one text part, and function calls."""

    def __init__(
        self,
        dialogue: Dialogue,
        asked: ResponsesRequest,
        messages: list[blocks.MessageFields],
        keep: Callable[[KeptResponse], None],
    ) -> None:
        super().__init__(dialogue)
        self._asked, self._messages, self._keep = asked, messages, keep
        self._id = new_id("resp_")
        self._created = self._service.now()
        self._number = 0  # of the next event

    # -- the whole -----------------------------------------------------------------------------

    def _result(self) -> Chunk:
        shown = self._response()
        if self._asked.store and shown["status"] != "in_progress":
            messages = [*self._messages, *messages_of(self._blocks, lambda name: None)]
            self._keep(KeptResponse(messages, shown))
        return shown

    def _response(self) -> dict[str, Any]:
        asked, sampling = self._asked, sampling_of(self._asked, self._service.facts.sampling)
        cut = self._reason == "length"
        done = "incomplete" if cut else "completed"
        format = asked.text.format.model_dump(exclude_none=True, by_alias=True)
        if format["type"] != "json_schema":
            format = {"type": format["type"]}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if self._done is None else done,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": asked.model or self._service.model,
            "output": [dict(block) for block in self._blocks],
            "temperature": sampling["temperature"],
            "text": {"format": format},
            "top_p": sampling["top_p"] if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            **asked.model_dump(include=_REPEATED),
            **self.receipt,
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._done is None:
            return None
        read, written = len(self._dialogue.prompt), len(self._done.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self._done.stats.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }

    # -- events --------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Chunk:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Chunk:
        index = len(self._blocks) - 1
        where = {"item_id": self._blocks[index]["id"], "output_index": index}
        if self._is_text(self._blocks[index]):
            where["content_index"] = 0
        return self._event(kind, **where, **fields)

    def _opening(self) -> Iterator[Chunk]:
        shown = {**self._response(), "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=shown)

    def closing(self) -> list[Chunk]:
        shown = self._result()
        return [self._event(f"response.{shown['status']}", response=shown)]

    def failed(self, error: APIError) -> Chunk:
        body = error_body(error)
        return self._event("error", **{**body["error"], "type": "error"}, **body)

    def _item_id(self, kind: str) -> str:
        """The id of the next block."""
        return f"{kind}_{self._id.removeprefix('resp_')}_{len(self._blocks)}"

    def _new_text(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "id": self._item_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [part],
        }

    def _new_call(self, call: str, name: str) -> dict[str, Any]:
        namespace, tool = self._asked.functions[name]
        return {
            "id": self._item_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call,
            **({} if namespace is None else {"namespace": namespace}),
            "name": tool.name,
            "arguments": "",
        }

    def _started(self, block: dict[str, Any]) -> Iterator[Chunk]:
        text, index = self._is_text(block), len(self._blocks) - 1
        item = block | ({"content": []} if text else {})
        yield self._event("response.output_item.added", output_index=index, item=item)
        if text:
            yield self._of_item("response.content_part.added", part=dict(block["content"][0]))

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Chunk]:
        part = self._blocks[-1]["content"][0]
        part["text"] += text
        part["logprobs"] = [*part["logprobs"], *logprobs]
        yield self._of_item("response.output_text.delta", delta=text, logprobs=logprobs)

    def _add_arguments(self, piece: str) -> Iterator[Chunk]:
        self._blocks[-1]["arguments"] += piece
        yield self._of_item("response.function_call_arguments.delta", delta=piece)

    def _ended(self, block: dict[str, Any], cut: bool) -> Iterator[Chunk]:
        block["status"] = "incomplete" if cut else "completed"
        if self._is_text(block):
            part = block["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            yield self._of_item("response.output_text.done", text=text, logprobs=logprobs)
            yield self._of_item("response.content_part.done", part=part)
        else:
            call = {name: block[name] for name in ("name", "arguments")}
            yield self._of_item("response.function_call_arguments.done", **call)
        index = len(self._blocks) - 1
        yield self._event("response.output_item.done", output_index=index, item=dict(block))


@dataclass(frozen=True)
class KeptResponse:
    """``messages``: the conversation with this answer. ``shown``: what the client got."""

    messages: list[dict[str, Any]]
    shown: dict[str, Any]


class ResponseStore:
    """Responses that later requests may continue, by owner (API key; one owner without keys) and
    id. They are kept in memory as JSON, so their size is known and nobody changes them. Where they
    take more than ``MAX_BYTES`` the owner that has most loses its oldest."""

    def __init__(self) -> None:
        # By owner, the least recently used first.
        self._owners: dict[str, OrderedDict[str, bytes]] = {}
        self.sizes = Counter[str]()  # bytes by owner

    def keep(self, owner: str, response: KeptResponse) -> None:
        """Store a response with a new id. One larger than ``MAX_BYTES`` is not stored."""
        # A client's text may have lone surrogates.
        text = json.dumps(vars(response), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(text) > MAX_BYTES:
            return
        self._owners.setdefault(owner, OrderedDict())[response.shown["id"]] = text
        self.sizes[owner] += len(text)
        while self.sizes.total() > MAX_BYTES:
            most = max(self.sizes, key=self.sizes.__getitem__)
            self.drop(most, next(iter(self._owners[most])))

    def get(self, owner: str, name: str) -> KeptResponse | None:
        """The response of that id."""
        responses = self._owners.get(owner, OrderedDict())
        if name not in responses:
            return None
        responses.move_to_end(name)
        return KeptResponse(**json.loads(responses[name]))

    def drop(self, owner: str, name: str) -> None:
        """Forget a stored response."""
        self.sizes[owner] -= len(self._owners[owner].pop(name))

    def item(self, owner: str, name: str) -> dict[str, Any] | None:
        """An output item of one of the owner's responses, whose id is a part of the item's."""
        response = self.get(owner, f"resp_{name.partition('_')[2].partition('_')[0]}")
        outputs = [] if response is None else response.shown["output"]
        return next((item for item in outputs if item["id"] == name), None)
