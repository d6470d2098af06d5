"""Drawing tokens: adjusted logits, filters, the draw itself and its kernels."""
