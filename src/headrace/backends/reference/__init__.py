"""The reference backend: every operation in plain numpy; all others are tested against it."""
