"""Launch numbers, measured: search spaces as code, and one tuner for all kernels (`python -m benchmarks.tuning`)."""
