"""Meshes, rules from logical names to mesh axes, and collectives; knows jax, not the model."""
