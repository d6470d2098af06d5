"""What traffic looks like: arrivals, lengths, shared prefixes, sessions, traces, and its objectives."""
