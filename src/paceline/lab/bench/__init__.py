"""Measuring decoding: prompts, contestants, rounds, figures."""
