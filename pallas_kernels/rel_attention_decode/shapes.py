"""Sizes of Inkling 2 Small's attention, at which the kernel is tested on a GPU and timed."""

HEADS, KV_HEADS, DIM, RANKS = 48, 8, 128, 16
EXTENT = WINDOW = 1024
CONTEXTS = (8192, 102400, 1048576)
