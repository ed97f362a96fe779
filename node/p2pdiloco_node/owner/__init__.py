"""What the run's owner can say to a run that goes on: words, a rescue, a fork (protocol.md 3, 7)."""
