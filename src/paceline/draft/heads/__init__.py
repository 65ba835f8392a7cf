"""Heads on the hidden states of the target: EAGLE, Medusa, and their checkpoints."""
