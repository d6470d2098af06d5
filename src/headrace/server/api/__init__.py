"""The endpoints: one file for each, and the table of which path leads to which."""
