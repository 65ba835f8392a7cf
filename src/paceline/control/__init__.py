"""Who drafts, and how far: prices, acceptance, ledger, controller and hybrid."""
