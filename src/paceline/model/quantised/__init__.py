"""Weights in 8 and 4 bits: their arithmetic, how they are rounded, read and written."""
