"""What may become of a request besides an answer; no model and no HTTP is needed to know it."""

from __future__ import annotations

from paceline.errors import PacelineError


class BusyError(PacelineError):
    """The queue is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(PacelineError):
    """The server is shutting down and takes no new requests."""


class DeadlineError(PacelineError):
    """A request was not done in time and has been cancelled.

    ``by_request``: the deadline was the request's, not the server's.
    """

    def __init__(self, by_request: bool) -> None:
        whose = "its own deadline" if by_request else "the server's deadline"
        super().__init__(f"the request was not done by {whose}; ask for fewer tokens")
        self.by_request = by_request


class EngineError(PacelineError):
    """The engine failed on a step; the message is for the log, not for clients."""


class RequestFailedError(EngineError):
    """The engine failed on this request alone; the message says at what."""


class GoneError(PacelineError):
    """There is no engine any more, and there will be none in this process."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped and the server is ending; try again later")


class ClientGoneError(PacelineError):
    """Whoever asked has closed the connection."""


class SlowReaderError(PacelineError):
    """A client does not read what it asked for."""

    def __init__(self) -> None:
        super().__init__("the answer was not read, so the request has been cancelled")
