"""The webhook: gpu.alerts -> one signed JSON POST for each transition."""
