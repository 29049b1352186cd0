"""Kernels, a folder per operation: contract, plain reference, kernel, tiles, shapes."""
