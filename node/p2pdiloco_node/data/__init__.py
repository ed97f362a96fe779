"""The run's data on a node's disk: fetched, opened for the trainer, within the quota."""
