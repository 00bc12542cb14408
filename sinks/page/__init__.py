"""The page: the fleet now, live in a browser."""
