"""What clients send and read: a layer for each API over one dialogue, and what they share."""
