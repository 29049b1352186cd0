"""Sizes of Inkling 2 Small's residual stream, at which the kernel is tested on a GPU and timed."""

HIDDEN, TAPS = 4608, 4
BLOCKS = 8  # finished blocks that the last layers see, besides the running sum
