"""One module an op: its checks, outputs, grid and autograd, and its plain-torch reference. Each names its class ``OP``."""
