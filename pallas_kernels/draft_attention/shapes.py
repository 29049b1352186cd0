"""Sizes of a full-size drafter (Qwen3's), at which the kernel is tested on a GPU."""

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 5
BLOCK = 7
