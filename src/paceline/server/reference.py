"""The API's reference as a page, from its OpenAPI description: no scripts, nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """\
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8885; padding: .25rem .5rem; text-align: left }
code { font-size: .9em; overflow-wrap: anywhere }
h2 { border-top: 1px solid #8885; padding-top: .7rem; margin-bottom: .2rem }
"""
_REF = "#/components/schemas/"


def reference(api: Mapping[str, Any]) -> str:
    """HTML: every call with its parameters and body, then every record with its fields."""
    schemas = api.get("components", {}).get("schemas", {})
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
            '<p>The same as JSON: <a href="/openapi.json">/openapi.json</a></p>',
            *(part for path, calls in api["paths"].items() for part in _calls(path, calls)),
            "<h1>Records</h1>",
            *(part for name, schema in schemas.items() for part in _record(name, schema)),
            "</body></html>",
        )
    )


def _calls(path: str, calls: Mapping[str, Any]) -> Iterator[str]:
    for method, call in calls.items():
        yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
        yield f"<p>{escape(call.get('description') or call.get('summary', ''))}</p>"
        parameters = {item["name"]: item.get("schema", {}) for item in call.get("parameters", ())}
        yield from _fields(parameters, ())
        for content in call.get("requestBody", {}).get("content", {}).values():
            yield f"<p>Body: {_type(content.get('schema', {}))}</p>"
        yield f"<p>Answers: {', '.join(map(escape, call.get('responses', ())))}</p>"


def _record(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    yield from _fields(schema.get("properties", {}), schema.get("required", ()))


def _fields(fields: Mapping[str, Any], required: Any) -> Iterator[str]:
    if not fields:
        return
    yield "<table><tr><th>field<th>type<th>default<th></tr>"
    for name, schema in fields.items():
        default = "required" if name in required else repr(schema.get("default", ""))
        bounds = ", ".join(f"{k} {schema[k]}" for k in ("minimum", "maximum") if k in schema)
        about = escape(schema.get("description", "") or bounds)
        cells = f"<code>{escape(name)}</code>", _type(schema), escape(default), about
        yield "<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a field in HTML, with links to records."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    several = [item for key in ("anyOf", "oneOf", "allOf") for item in schema.get(key, ())]
    if several:
        return " or ".join(map(_type, several))
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return escape(", ".join(map(repr, values)) or str(schema.get("type", "any")))
