"""The page at /: one HTML document with its style and script, without anything from elsewhere."""
