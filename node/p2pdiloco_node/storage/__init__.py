"""Disk: keys, blobs, journal, states, history. Old or new after a crash, never mixed."""
