"""Published checkpoints in, Orbax checkpoints out: reading, mapping, conversion, restore."""
