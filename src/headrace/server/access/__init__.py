"""Who may send requests, how many, and whether there is room for one more to wait."""
