"""From a model's files to weights: opening, finding, and what their values mean."""
