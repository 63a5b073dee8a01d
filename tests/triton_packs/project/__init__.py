"""A small project of Triton kernels, as others write them: what tests record, build and run."""
