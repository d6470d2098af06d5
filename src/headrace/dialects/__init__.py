"""Other engines' words: their flags read, and our settings written as theirs."""
