"""PyTorch implementations: slow, obvious oracles, and what serves on a machine without a GPU."""
