"""Ways to run a forward over the paged cache."""
