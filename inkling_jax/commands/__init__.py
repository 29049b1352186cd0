"""One module per command of the command line; each calls the public names of inkling_jax only."""
