"""What bench_spec.py measures of speculative decoding."""
