"""Rules: what they are, and the file that they are read from."""
