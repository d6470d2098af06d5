"""The CUDA backend: the decoder is recorded once, and replayed as kernel launches on a GPU."""
