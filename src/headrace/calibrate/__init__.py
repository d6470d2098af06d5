"""Measures this machine: bandwidth, matrix rates, and the step times of a loaded model."""
