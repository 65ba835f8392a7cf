"""Who drafts, and how far: prices, acceptance, risk, controller and hybrid."""
