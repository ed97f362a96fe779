"""Piles of text become token shards: found, read, cleaned, shuffled, held out, tokenised, packed.

`making.py` is the way through it. Everything between the files and the shards lies in a work folder, so that
a corpus much larger than memory can be made, and a making that was killed goes on where it was.
"""
