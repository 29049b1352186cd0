"""Sizes of Inkling 2 Small's projections, at which the kernel is tested on a GPU and timed."""

HIDDEN = 4608
HEADS = 6144  # rows of q and of the output gate: heads x head size
KV_HEADS = 1024
SLIDING = (HEADS, HEADS, 768, 48, KV_HEADS, KV_HEADS)  # q, gate, r, sink; k; v
FULL = (*SLIDING, 32, 32)  # the dynamic taps of k and v
RANK = (1536, 1536, 192, 12, 256, 256)  # of a sliding layer under TP4
WO = (4608, HEADS)
HEAD_ROWS = 201024
