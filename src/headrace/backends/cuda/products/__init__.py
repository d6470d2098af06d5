"""Matrix products: formats of weights, the choice of kernels, and the kernels."""
