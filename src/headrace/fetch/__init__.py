"""Getting models: from a name to verified files on this machine."""
