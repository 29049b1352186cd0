"""How a row of logits is cut."""

GROUP = 128  # neighbours whose largest value is kept
GROUPS = 32  # of them that a program of the first kernel takes
HEAD = 64  # groups with the largest values, which usually hold all that can be drawn
CHUNK = GROUP * HEAD  # values that the last kernel holds, and reads at a time
WARPS = 16  # of it: 16 values a thread
