"""Conditions: what of a node's tick is as a rule says."""
