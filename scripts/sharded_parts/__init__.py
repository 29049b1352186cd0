"""What bench_sharded.py runs: processes that take turns, and in each of them one part."""
