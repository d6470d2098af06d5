"""What a model is: its dimensions, its forward pass, and the names of its weights."""
