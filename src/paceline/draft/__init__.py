"""Drafters: each proposes a token tree per sequence, and watches what was committed."""
