"""A target whose weights lie in several processes, one of which decodes with it."""
