"""Heads on the hidden states of the target: EAGLE, MTP, Medusa, block drafters; checkpoints."""
