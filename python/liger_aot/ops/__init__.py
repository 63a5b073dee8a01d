"""One module an op: checks, outputs, grid, autograd, and its plain-torch reference. Each names its class ``OP``."""
