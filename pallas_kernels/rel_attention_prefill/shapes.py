"""Sizes of Inkling 2 Small's attention, at which the kernel is tested on a GPU and timed."""

HEADS, KV_HEADS, DIM, RANKS = 48, 8, 128, 16
EXTENT = WINDOW = 1024
FULL, SLIDING = (16384, 32768), 8192  # tokens of a call
CONTINUED = 2240, None, 81920  # tokens, window and what was read before: a turn of an agent
