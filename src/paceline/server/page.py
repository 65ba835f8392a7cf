"""The page at ``/``: one file, and a policy under which it can load nothing else."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse


def router() -> APIRouter:
    """Serves the page from memory."""
    routes = APIRouter()
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def policy(page: str) -> str:
    """Only the page's own script and style, known by their hashes, and only this server."""
    script, style = (
        " ".join(f"'{_digest(part)}'" for part in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
