"""Training of DSpark drafters."""
