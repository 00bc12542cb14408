"""Conditions: which of the rules hold in a node's tick."""
