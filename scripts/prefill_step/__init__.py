"""What bench_prefill.py runs: calls of the product's prefill, compiled and counted."""
