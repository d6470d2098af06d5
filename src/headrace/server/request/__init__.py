"""What endpoints share: from a request's body to an engine request, and back to an answer."""
