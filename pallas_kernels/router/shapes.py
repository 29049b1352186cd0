"""Sizes of Inkling 2 Small's router, at which the kernel is tested on a GPU and timed."""

HIDDEN, EXPERTS, PICKS, SCALE = 4608, 384, 8, 8.0
