"""How much memory everything takes, and what follows from a budget."""
