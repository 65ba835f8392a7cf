"""What clients send and read: a layer for each API over one chat, and what they share."""
