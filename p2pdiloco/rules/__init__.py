"""Numbers to numbers: staleness, weights, caps, full rounds, closing. No arrays, no peers to talk to."""
