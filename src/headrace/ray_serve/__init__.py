"""Headrace on a Ray cluster: Ray Serve places replicas, watches them and makes more or fewer; where
a request goes and how many replicas there should be is decided by policies/. docs/ray.md."""
