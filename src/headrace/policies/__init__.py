"""Decisions about requests before an engine has them: queueing, routing, scaling. Pure values."""
