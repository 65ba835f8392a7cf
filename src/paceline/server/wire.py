"""The messages between the HTTP side and the engine, and their encoding on a socket.

    HTTP                                        engine
    ServeConfig ------------------------------>           (only between two processes)
           <-------------------------------------- Hello(facts) | Lost(reason)
    Submit(number, prompts, params, ...) ----->
           <-------------------------------------- Done(number, "") | Ended(number, error)
           <-------------------------------- StepEvents(events), one per step for all tickets
           <-------------------------------------- Ended(number, error)
    Cancel(number, outcome) ------------------>
    Scrape(number), SetAdapter(number, ...) -->            (Cancel: the text is a number of tokens)
           <-------------------------------------- Done(number, text) | Ended(number, error)
           <-------------------------------------- Lost(reason)

A message is its length in four bytes, then its MessagePack encoding. Nothing is unpickled."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from paceline.core.params import SamplingParams
from paceline.request.completion import StreamEvent
from paceline.request.options import SamplingDefaults
from paceline.request.validation import ContextBudget
from paceline.server.config import ServeConfig
from paceline.server.failures import APIError

if TYPE_CHECKING:
    from paceline.llm import LLM

_HEADER = struct.Struct("<I")


class Facts(msgspec.Struct):
    """What the HTTP side knows about the engine. ``drafts`` are the specs of the drafters,
    ``adapters`` the folders of the adapters loaded at start-up, by name."""

    context_budget: ContextBudget
    drafters: tuple[str, ...]
    dtype: str
    device: str
    backend: str
    notes: tuple[str, ...] = ()
    max_batch_size: int = 1
    sampling: SamplingDefaults = SamplingDefaults()
    drafts: tuple[str, ...] = ()
    adapters: dict[str, str] = {}

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        return cls(
            llm.context_budget,
            tuple(llm.drafters),
            str(llm.target.dtype).removeprefix("torch."),
            str(llm.target.device),
            llm.target.backend_reason,
            tuple(llm.setup_notes),
            llm.engine.scheduler.config.max_batch_size,
            llm.sampling_defaults,
            tuple(llm.drafts),
            {adapter.name: adapter.folder for adapter in llm.adapters.loaded},
        )


class WireMessage(msgspec.Struct, array_like=True, gc=False, tag=True):
    """The base of all messages. ``number``: of a ticket or another call, and of its replies."""


class Submit(WireMessage):
    """Generate ``params.n`` completions for each prompt. With ``streams`` there is an event for
    each step, otherwise one event for each completion."""

    number: int
    prompts: list[list[int]]
    params: SamplingParams
    streams: bool


class Cancel(WireMessage):
    """Drop the requests of a ticket; ``outcome`` ("cancelled" or "deadline") is for the metrics."""

    number: int
    outcome: str


class Scrape(WireMessage):
    """Ask for the metrics as text."""

    number: int


class SetAdapter(WireMessage):
    """Load an adapter, replacing one of the same name; unload it if ``folder`` is None."""

    number: int
    name: str
    folder: str | None


class Hello(WireMessage):
    """The model has been loaded."""

    facts: Facts


class Done(WireMessage):
    """A call has succeeded; for a Submit, its requests are queued."""

    number: int
    text: str = ""


class StepEvents(WireMessage):
    """The events of a step, each with the number of its ticket. A request that is not streamed has
    a single event with its completion. Completions leave out the prompt."""

    events: list[tuple[int, StreamEvent]]


class Ended(WireMessage):
    """A ticket or another call has ended with an error."""

    number: int
    error: APIError


class Lost(WireMessage):
    """Loading failed, or the engine thread has ended and cannot be restarted."""

    reason: str


EngineCommand = Submit | Cancel | Scrape | SetAdapter
Reply = Hello | Done | StepEvents | Ended | Lost


# APIError is the only type that msgspec cannot encode; it is sent as a tuple of its arguments.
_ENCODER = msgspec.msgpack.Encoder(
    enc_hook=lambda e: (str(e), e.status, e.kind, e.param, e.code, e.headers)
)
REQUESTS: msgspec.msgpack.Decoder[EngineCommand] = msgspec.msgpack.Decoder(EngineCommand)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(
    Reply, dec_hook=lambda kind, fields: kind(*fields)
)


def encode_message(message: WireMessage | ServeConfig) -> bytes:
    """A message with its length, as bytes. Raises UnicodeEncodeError or OverflowError."""
    buffer = bytearray(_HEADER.size)
    _ENCODER.encode_into(message, buffer, _HEADER.size)
    _HEADER.pack_into(buffer, 0, len(buffer) - _HEADER.size)
    return bytes(buffer)


def read_message(connection: socket.socket) -> bytes | None:
    """Wait for the next message; None once either side has closed the connection."""
    try:
        header = connection.recv(_HEADER.size, socket.MSG_WAITALL)
        if len(header) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack(header)
        body = connection.recv(length, socket.MSG_WAITALL)
    except OSError:  # another thread may have closed the connection
        return None
    return body if len(body) == length else None


async def read_message_async(stream: asyncio.StreamReader) -> bytes | None:
    """``read_message`` for an event loop."""
    try:
        (length,) = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        return await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
