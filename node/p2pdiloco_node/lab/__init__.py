"""`p2pdiloco simulate`: the lab of p2pdiloco/sim/lab with files, processes and plots; or seeds alone."""
