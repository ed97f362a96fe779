"""One long-lived process on this machine: signals, faults, addresses, where it can be found."""
