"""Several processes compute one model: they meet in sums, and all follow the first one's plans."""
