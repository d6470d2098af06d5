"""One file for each model family, and the names of fields and tensors that they share."""
