"""Curves and samples for TensorBoard and W&B: which figures, and who writes them."""
