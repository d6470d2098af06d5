"""From a model's files to weights: opens files, finds tensors, and defines their values."""
