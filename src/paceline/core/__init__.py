"""Plain types shared by every stage: trees, sequences, batches, verdicts. Torch and stdlib only."""
