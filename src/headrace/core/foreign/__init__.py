"""Other engines' words for settings: one table for each engine, and what they mean here."""
