"""Method specs: ``plain``, drafters with a length (``ngram@5``), those of transformers, and servers
(``url:http://HOST:PORT``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.drafters import DRAFTERS, DraftModel, parse_draft
from paceline.errors import ConfigError

PLAIN = "plain"
DRAFT = "draft"
URL = "url"
TRANSFORMERS = "transformers"
_BUILT_IN = "paceline/"
_VARIANTS = ("assisted", "lookup")
_LONGEST = 64

Length = int | Literal["auto"]


@dataclass(frozen=True)
class Method:
    """``draft`` is a draft spec; None decodes plainly. ``length`` None: the library's own.

    ``variant`` is what transformers does: "plain", "assisted" or "lookup"; None if it is ours. Of
    a server of another engine it is "url", and ``url`` its address.
    """

    name: str
    draft: str | None = None
    length: Length | None = "auto"
    variant: str | None = None
    url: str | None = None

    @property
    def alone(self) -> bool:
        """Whether it answers one request at a time, as transformers does."""
        return self.variant is not None and self.url is None

    @property
    def speculates(self) -> bool:
        return self.draft is not None or self.variant in _VARIANTS

    @property
    def remembers(self) -> bool:
        """Whether earlier requests help it with later ones."""
        if self.draft is None or self.variant is not None:
            return False
        return any(member.remembers for member in parse_draft(self.draft).members())


def parse_method(text: str, draft: str | None, length: Length = "auto") -> Method:
    """One spec, perhaps with ``@LENGTH``. ``draft``: what ``draft`` stands for. Raises ConfigError.

    Without ``@`` ours take ``length``, those of transformers the library's own default.
    """
    text = text.strip()
    body, named_length = _split(text)
    head, _, variant = body.partition(":")
    if head == URL:
        address = text.partition(":")[2]
        if not address:
            raise ConfigError(f"method {text!r} needs its address: url:http://HOST:PORT")
        return Method(text, None, None, URL, address)
    if head == TRANSFORMERS:
        return _transformers(text, variant, draft, named_length)
    if body in (PLAIN, "none"):
        if named_length is not None:
            raise ConfigError(f"method {text!r}: plain decoding drafts nothing; leave out the @")
        return Method(PLAIN, length=0)
    if body == DRAFT:
        if draft is None:
            raise ConfigError(f"method {text!r}: no draft is named; add --draft, or name it here")
        body = draft
    elif not (
        head in DRAFTERS
        or body.startswith(_BUILT_IN)
        or "/" in body
        or Path(body).expanduser().is_dir()
    ):
        raise _unknown(text)
    return Method(text, body, length if named_length is None else named_length)


def _transformers(text: str, variant: str, draft: str | None, length: Length | None) -> Method:
    if variant == "" and length is None:
        return Method(TRANSFORMERS, None, None, "plain")
    if variant not in _VARIANTS:
        raise _unknown(text)
    if length == "auto":
        raise ConfigError(f"method {text!r}: transformers has no automatic length; give a number")
    if variant == "lookup":
        return Method(text, None, length, variant)
    spec = parse_draft(draft)
    if not isinstance(spec, DraftModel):
        raise ConfigError(f"method {text!r} needs a draft model; name one with --draft FOLDER")
    return Method(text, spec.path, length, variant)


def _unknown(text: str) -> ConfigError:
    kinds = ", ".join(sorted(set(DRAFTERS) - {"none"}))
    theirs = ", ".join([TRANSFORMERS, *(f"{TRANSFORMERS}:{name}" for name in _VARIANTS)])
    return ConfigError(
        f"there is no method {text!r}; there are {PLAIN}, {DRAFT} (what --draft names), {theirs}, "
        f"url:http://HOST:PORT, {kinds}, or a draft model's folder"
    )


def parse_methods(
    texts: Sequence[str],
    draft: str | None,
    length: Length = "auto",
    lengths: Sequence[int] = (),
) -> list[Method]:
    """All methods, plain decoding first: nothing can be judged without it.

    ``lengths`` runs every drafter that names no length at each of them. Raises ConfigError.
    """
    methods = [Method(PLAIN, length=0)]
    for text in texts:
        method = parse_method(text, draft, length)
        if lengths and method.draft is not None and _split(text)[1] is None:
            methods += [replace(method, name=f"{method.name}@{n}", length=n) for n in lengths]
        else:
            methods.append(method)
    return list({method.name: method for method in methods}.values())


def parse_lengths(text: str | None) -> list[int]:
    """``1,2,4,8``. Raises ConfigError."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _LONGEST for part in parts):
        raise ConfigError(f"--lengths {text!r}: write numbers from 1 to {_LONGEST}, as in 1,2,4,8")
    return list(dict.fromkeys(map(int, parts)))


def _split(text: str) -> tuple[str, Length | None]:
    """A path may contain @, but does not end in @NUMBER."""
    body, at, tail = text.rpartition("@")
    if not at or not (tail == "auto" or tail.lstrip("-").isdecimal()):
        return text, None
    if tail == "auto":
        return body, "auto"
    if not 1 <= int(tail) <= _LONGEST:
        raise ConfigError(f"method {text!r}: draft lengths go from 1 to {_LONGEST}, or auto")
    return body, int(tail)
