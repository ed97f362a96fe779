"""Lets an exported model talk: `p2pdiloco generate`, and the process with torch that does it."""
