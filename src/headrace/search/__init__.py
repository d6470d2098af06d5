"""What to rent: searches deployments by simulating them, and says what they cost."""
