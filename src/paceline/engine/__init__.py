"""The decoding loop, its scheduler and clock, and what follows a failed step."""
