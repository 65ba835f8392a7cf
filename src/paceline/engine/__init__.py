"""The decoding loop, its scheduler, its draft-length controller and its text output."""
