"""A whole swarm in one thread from one seed, with its faults, and checkers that look at it from outside."""
