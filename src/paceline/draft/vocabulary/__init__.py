"""Drafts in a vocabulary of their own: matched by tokens, or by the text."""
