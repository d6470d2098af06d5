"""Whether a model fits on a GPU: what `headrace fit`, `headrace plan` and the page ask."""
