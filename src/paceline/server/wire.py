"""The messages between the HTTP side and the engine, and their encoding on a socket.

    HTTP                                        engine
    LoadModel(config) ------------------------>           (two processes only)
           <-------------------------------------- Hello(facts) | Lost(reason)
    Submit(number, prompts, params, ...) ----->
           <-------------------------------------- Done(number, "") | Ended(number, error)
           <-------------------------------- StepEvents(events), one a step for all tickets
           <-------------------------------------- Ended(number, error)
    Cancel(number, outcome) ------------------>
    Scrape(number), SetAdapter(number, ...) -->
           <-------------------------------------- Done(number, text) | Ended(number, error)
           <-------------------------------------- Lost(reason)

A message is four bytes of length and MessagePack. Nothing is unpickled.
"""

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
    """What the HTTP side knows of an engine."""

    context_budget: ContextBudget
    drafters: tuple[str, ...]
    dtype: str
    device: str
    backend: str
    notes: tuple[str, ...] = ()
    max_batch_size: int = 1
    sampling: SamplingDefaults = SamplingDefaults()
    drafts: tuple[str, ...] = ()  # the specs of the drafters
    adapters: dict[str, str] = {}  # folders by name, at the start

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        return cls(
            llm.context_budget,
            tuple(llm.drafters),
            str(llm.target.dtype).removeprefix("torch."),
            str(llm.target.device),
            llm.target.backend_reason,
            tuple(llm.notes),
            llm.engine.scheduler.config.max_batch_size,
            llm.sampling_defaults,
            tuple(llm.drafts),
            {adapter.name: adapter.folder for adapter in llm.adapters.loaded},
        )


class WireMessage(msgspec.Struct, array_like=True, gc=False, tag=True):
    """One of the messages below."""


class LoadModel(WireMessage):
    """The first message."""

    config: ServeConfig


class Submit(WireMessage):
    """``n`` answers for each prompt, step by step if it ``streams``."""

    number: int  # of the ticket
    prompts: list[list[int]]
    params: SamplingParams
    streams: bool


class Cancel(WireMessage):
    """``outcome``: "cancelled" or "deadline"."""

    number: int
    outcome: str


class Scrape(WireMessage):
    number: int


class SetAdapter(WireMessage):
    """Load an adapter, in place of one of this name; without a folder, unload it."""

    number: int
    name: str
    folder: str | None


class Hello(WireMessage):
    facts: Facts


class Done(WireMessage):
    """What was asked has been done; a ticket is accepted."""

    number: int
    text: str = ""


class StepEvents(WireMessage):
    """A step's events with their tickets. An answer that is not streamed has one event a text, its
    completion. Prompts are not sent back."""

    events: list[tuple[int, StreamEvent]]


class Ended(WireMessage):
    """A ticket ends with an error, or something else that was asked."""

    number: int
    error: APIError


class Lost(WireMessage):
    """Loading failed, or the engine's thread has ended and cannot be restarted."""

    reason: str


EngineCommand = LoadModel | Submit | Cancel | Scrape | SetAdapter
Reply = Hello | Done | StepEvents | Ended | Lost


# An ``APIError``, the only type that msgspec does not know, is sent as its arguments.
_ENCODER = msgspec.msgpack.Encoder(
    enc_hook=lambda e: (str(e), e.status, e.kind, e.param, e.code, e.headers)
)
REQUESTS: msgspec.msgpack.Decoder[EngineCommand] = msgspec.msgpack.Decoder(EngineCommand)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(
    Reply, dec_hook=lambda kind, fields: kind(*fields)
)


def encode_message(message: WireMessage) -> bytes:
    """Length and message. Raises msgspec's errors for what cannot be encoded."""
    buffer = bytearray(_HEADER.size)
    _ENCODER.encode_into(message, buffer, _HEADER.size)
    _HEADER.pack_into(buffer, 0, len(buffer) - _HEADER.size)
    return bytes(buffer)


def read_message(connection: socket.socket) -> bytes | None:
    """Wait for a message; None once either side has closed."""
    try:
        header = connection.recv(_HEADER.size, socket.MSG_WAITALL)
        if len(header) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack(header)
        body = connection.recv(length, socket.MSG_WAITALL)
    except OSError:  # another thread may have closed it
        return None
    return body if len(body) == length else None


async def read_message_async(stream: asyncio.StreamReader) -> bytes | None:
    """``read_message`` on an event loop."""
    try:
        (length,) = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        return await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
