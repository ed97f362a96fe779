"""The trainer process, the only one with torch, and the daemon's side of it."""
