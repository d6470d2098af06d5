"""What backends have in common (plans in flight, answers, the recorder); it knows none of them."""
