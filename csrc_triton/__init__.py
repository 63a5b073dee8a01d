"""Device code. One file an op: its Triton functions, and DECLARATION, a literal that says how they are compiled.

DECLARATION is read with ``ast.literal_eval``, so that planning never imports Triton. Files without one
hold device code that ops import.
"""
