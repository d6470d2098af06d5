"""What backends have in common; it knows none of them."""
