"""The engine's process, and the messages between it and the HTTP process."""
