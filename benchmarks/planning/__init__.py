"""Planning against what was measured: the roofline, the simulator, and other planners."""
