"""Other engines as contestants of ``paceline bench``, each in a process of its own."""
