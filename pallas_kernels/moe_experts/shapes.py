"""Sizes of Inkling 2 Small's experts, at which the kernel is tested on a GPU and timed."""

HIDDEN, EXPERTS, PICKS = 4608, 384, 8
WIDTH, WIDTH_TP4, WIDTH_TP8 = 2304, 576, 288  # of an expert: whole, and a rank's part of it
GATE_SOFTCAP, UP_SOFTCAP = 4.0, 25.0
