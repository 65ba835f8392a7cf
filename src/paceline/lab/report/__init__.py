"""Reports of the measuring commands: one document for the terminal, Markdown and HTML."""
