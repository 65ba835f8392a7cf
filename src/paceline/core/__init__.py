"""Types and pure functions that all stages share: sequences, trees, batches, commits, sampling.
Imports only torch, numpy and the standard library."""
