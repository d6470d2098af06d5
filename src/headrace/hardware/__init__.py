"""GPUs and CPU hosts as data: memory, bandwidth, rates, links and prices, each with its source."""
