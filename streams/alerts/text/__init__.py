"""Text: an alert's labels and annotations, and the reference page."""
