"""What a model is: its numbers, its forward pass, and where its weights should lie."""
