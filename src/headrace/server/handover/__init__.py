"""Hands the KV blocks of a prompt from the engine that computed them to the one that answers."""
