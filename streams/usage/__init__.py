"""The usage stream: who had each GPU, for how long, and what they did with it."""
