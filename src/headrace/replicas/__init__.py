"""Several replicas of a model on one host: processes, their shares, the router, rolling changes."""
