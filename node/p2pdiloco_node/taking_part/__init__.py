"""What takes part in a run: the parts of a training node, and what it has in common with a witness."""
