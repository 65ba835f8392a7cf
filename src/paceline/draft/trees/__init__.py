"""How trees of drafted tokens grow, their shapes, and tries."""
