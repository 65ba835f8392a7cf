"""Certifies servers by their answers alone: any that speaks OpenAI's protocol."""
