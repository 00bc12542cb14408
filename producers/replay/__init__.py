"""Published traces as a fleet: read from their files, sent with the times that they have."""
