"""`p2pdiloco demo`: a whole swarm on this machine, watched, hit and summed up."""
