"""Rules, and the file that they are read from."""
