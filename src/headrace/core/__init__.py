"""Words that every layer shares: requests, steps, settings, errors. Standard library only."""
