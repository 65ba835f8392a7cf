"""The paged cache of keys and values, and what attention needs to know of it."""
