"""Server-sent events: one JSON object a chunk, ``[DONE]`` at the end, errors as a last chunk."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from paceline.server.errors import as_api_error, error_body
from paceline.server.loop import Ticket

log = logging.getLogger("paceline.server")


def event_stream(chunks: AsyncIterator[dict[str, Any]], ticket: Ticket) -> StreamingResponse:
    """Stream chunks as they come; a client that goes away cancels the ticket."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _lines(chunks, ticket), media_type="text/event-stream", headers=headers
    )


async def _lines(chunks: AsyncIterator[dict[str, Any]], ticket: Ticket) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        # The status line is out; what remains is to say it in the stream.
        shown = as_api_error(error)
        if shown is not error and shown.status >= 500:
            log.warning("a stream ended early: %s", shown)
        yield f"data: {json.dumps(error_body(shown))}\n\n"
    finally:
        ticket.cancel()
