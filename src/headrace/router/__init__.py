"""A router: one address in front of several replicas of a model."""
