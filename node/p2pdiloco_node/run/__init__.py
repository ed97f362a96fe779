"""A run before it runs: made, described, checked, shown."""
