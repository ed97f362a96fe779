"""Arrays to arrays, in numpy float32: codecs, error feedback, merge, outer step. Maths does not know peers.

What every replica must compute alike (decode, merge, outer step) uses separately rounded elementwise
operations only; figures from reductions and transcendentals are declared in the log (algorithm.md 5).
"""
