"""The messages between those who speak HTTP and the engine, and how they cross a socket.

    HTTP                                        engine
    LoadModel(config) ------------------------>           (two processes only)
           <-------------------------------------- Hello(facts) | Failed
    Submit(ticket, prompts, params, ...) ----->
           <-------------------------------------- Accepted(ticket) | Ended(ticket, fault)
           <-------------------------------- StepEvents(events), one a step for all tickets
           <-------------------------------------- Ended(ticket, fault)
    Cancel(ticket), Scrape(number) ----------->
           <-------------------------------------- Scraped(number, text)
           <-------------------------------------- Lost(reason)

On a socket every message is four bytes of length and MessagePack. Nothing is ever unpickled.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from paceline import errors
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.server import failures
from paceline.server.config import ServeConfig
from paceline.server.failures import BusyError, DeadlineError, GoneError
from paceline.server.records import Event, Facts, WireRecord

_HEAD = struct.Struct("<I")


class Fault(WireRecord):
    """An error by its class's name; errors that we did not foresee lose theirs."""

    name: str
    message: str
    retry_after: int = 0
    own: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        if not isinstance(error, PacelineError):
            return cls("EngineError", "the engine failed on this request; see the server's log")
        # A message may quote what a client sent, and half a surrogate pair cannot be encoded.
        message = str(error).encode("utf-8", "replace").decode("utf-8")
        retry_after = error.retry_after if isinstance(error, BusyError) else 0
        own = error.own if isinstance(error, DeadlineError) else False
        return cls(type(error).__name__, message, retry_after, own)

    def error(self) -> PacelineError:
        """The error again; a class that is not known here becomes the base of all."""
        if self.name == "BusyError":
            return BusyError(self.message, self.retry_after)
        if self.name == "DeadlineError":
            return DeadlineError(self.own)
        if self.name == "GoneError":
            return GoneError()
        for home in (failures, errors):
            kind = getattr(home, self.name, None)
            if isinstance(kind, type) and issubclass(kind, PacelineError):
                return kind(self.message)
        return PacelineError(self.message)


class WireMessage(msgspec.Struct, array_like=True, gc=False, tag=True):
    """One of the messages below."""


class LoadModel(WireMessage):
    """The first message: what to load."""

    config: ServeConfig


class Submit(WireMessage):
    """``n`` answers for each prompt. ``seconds`` may be taken; ``own``: the request says so."""

    ticket: int
    prompts: list[list[int]]
    params: SamplingParams
    streams: bool
    seconds: float | None
    own: bool


class Cancel(WireMessage):
    ticket: int


class Scrape(WireMessage):
    number: int


class Hello(WireMessage):
    facts: Facts


class Failed(WireMessage):
    """Nothing could be loaded. ``expected``: for a reason that has a line of its own."""

    fault: Fault
    expected: bool


class Accepted(WireMessage):
    ticket: int


class StepEvents(WireMessage):
    events: list[Event]


class Ended(WireMessage):
    """A ticket will get nothing more, for a reason other than its completion."""

    ticket: int
    fault: Fault


class Scraped(WireMessage):
    number: int
    text: str


class Lost(WireMessage):
    """The engine's thread has ended and cannot be started again."""

    reason: str


EngineCommand = LoadModel | Submit | Cancel | Scrape
Reply = Hello | Failed | Accepted | StepEvents | Ended | Scraped | Lost

_ENCODER = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[EngineCommand] = msgspec.msgpack.Decoder(EngineCommand)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def framed(message: WireMessage) -> bytes:
    """Length and message. Raises what msgspec does on text or numbers that cannot be encoded."""
    buffer = bytearray(_HEAD.size)
    _ENCODER.encode_into(message, buffer, _HEAD.size)
    _HEAD.pack_into(buffer, 0, len(buffer) - _HEAD.size)
    return bytes(buffer)


class Frames:
    """Bytes as they come to whole messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + length
            if len(self._rest) < end:
                return
            body = bytes(self._rest[_HEAD.size : end])
            del self._rest[:end]
            yield body


def read_message(connection: socket.socket) -> bytes | None:
    """One message, waited for; None once the other end has gone."""
    head = _read(connection, _HEAD.size)
    if head is None:
        return None
    (length,) = _HEAD.unpack(head)
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        try:
            got = connection.recv_into(view[at:])
        except ConnectionError:
            return None
        if not got:
            return None
        at += got
    return bytes(data)
