"""The CUDA backend: a decoder recorded once and replayed as launches on a GPU."""
