"""Programs that call other projects' kernels at small shapes, each call with the same in plain torch."""
