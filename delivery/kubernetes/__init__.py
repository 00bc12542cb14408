"""The Kubernetes API: who we are to it, and what it answers."""
