"""Training of drafts and heads for a target."""
