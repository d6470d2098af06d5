"""Sockets and HTTP, up to the point where an endpoint is called."""
