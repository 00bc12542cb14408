"""The Kubernetes API: credentials, requests and streams."""
