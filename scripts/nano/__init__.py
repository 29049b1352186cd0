"""How inkling-jax-nano is made: corpus, tasks, training step, evaluation, export."""
