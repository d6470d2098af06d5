"""The real engine over a runner that only pretends: costs, and a clock that is told."""
