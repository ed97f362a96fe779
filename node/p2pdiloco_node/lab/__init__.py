"""`p2pdiloco simulate FILE`: the lab of p2pdiloco/sim/lab with files, processes, tables and plots."""
