"""What benchmarks/served_check.py asks a server, and how it tells whether an answer is right."""
