"""Size of Inkling 2 Small's vocabulary, at which the kernel is tested on a GPU and timed."""

VOCABULARY = 200_058
