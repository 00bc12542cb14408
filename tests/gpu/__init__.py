"""The node producer on this machine's GPUs, beside nvidia-smi: ``make gpu``."""
