"""Sizes of Inkling 2 Small's projections, at which the kernel is tested on a GPU and timed."""

HIDDEN = 4608
INPUT_ROWS = 15168  # q, k, v, r, gate and sink of a sliding layer, filled up to a multiple of 64
INPUT_BOUNDS = (13056, 14080)  # of a full layer: where the inputs of k and of v begin
WO = (4608, 6144)
HEAD_ROWS = 201024
