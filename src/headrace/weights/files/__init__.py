"""Readers of file formats: GGUF, safetensors, JSON. They trust nothing in a file."""
