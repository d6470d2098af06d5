"""From a body to a request of the engine, and back to an answer: what endpoints share."""
