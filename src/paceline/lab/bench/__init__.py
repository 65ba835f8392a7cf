"""Measuring decoding: prompts, engines, rounds, figures."""
