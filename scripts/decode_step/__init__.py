"""What bench_decode.py runs: parts of the model with random weights, and the compiled loops."""
