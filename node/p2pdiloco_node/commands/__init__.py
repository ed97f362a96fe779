"""What the one command reads: flags in, one function called. cli.py puts them together."""
