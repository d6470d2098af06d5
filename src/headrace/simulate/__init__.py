"""The real engine over a simulated runner: a cost model and a virtual clock."""
