"""Models of transformers over a paged cache."""
