"""What computes plans: one backend for each kind of machine, and what they share."""
