"""Matrix products: formats of weights, the choice of a kernel, and the kernels."""
