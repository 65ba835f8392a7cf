"""Weights of eight and four bits: what they are, how they are rounded, read and written."""
