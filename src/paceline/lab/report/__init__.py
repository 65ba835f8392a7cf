"""The renderer of the measuring commands: a table is declared once, as columns, from which screen,
JSON, Markdown and HTML follow (example: docs/contributing/architecture.md)."""
