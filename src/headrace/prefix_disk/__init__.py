"""The prefix cache on disk: KV blocks in files, which survive a restart (docs/prefix-disk.md)."""
