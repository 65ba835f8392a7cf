"""One engine's words each: how its command, configuration and heads say what was chosen here."""
