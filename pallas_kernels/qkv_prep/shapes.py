"""Sizes of Inkling 2 Small at which the kernel is tested on a GPU and timed."""

HEADS, KV_HEADS, DIM, RANKS = 48, 8, 128, 16
TAPS, BLOCK = 4, 8  # of a convolution; the most tokens that may be taken back
OPTIONS = {"qk_threshold": 512**0.5, "rel_threshold": 8.0, "eps": 1e-6}
LOG_SCALING = (128000, 0.1)  # of full layers
