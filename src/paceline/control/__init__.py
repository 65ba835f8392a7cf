"""Who drafts, and how far: prices, acceptance, the choice, exploration."""
