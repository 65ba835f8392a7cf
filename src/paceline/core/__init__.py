"""Plain types that all stages share: trees, sequences, batches, verdicts. Torch, numpy, stdlib."""
