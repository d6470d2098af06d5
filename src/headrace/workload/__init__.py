"""What traffic looks like: arrivals, lengths, shared prefixes, sessions, traces, objectives."""
