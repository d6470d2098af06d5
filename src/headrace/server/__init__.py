"""The server: an OpenAI-compatible endpoint in front of an engine in a process of its own."""
