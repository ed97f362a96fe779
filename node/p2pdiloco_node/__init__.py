"""What runs p2pdiloco: the daemon, the tracker, their files, sockets and processes."""

__version__ = "0.1.0"
