"""A step's inputs, block tables, graphs and results on the device."""
