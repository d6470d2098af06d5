"""How a server starts and how it ends."""
