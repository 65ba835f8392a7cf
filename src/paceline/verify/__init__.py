"""Verification: which tokens of a draft tree the target accepts, by lossless acceptance rules."""
