"""A recording of any project's Triton kernels -> packs and wheels: ``liger-aot pack``.

It ships in the host wheel. What a recording, a variant and a target are is ``liger_aot.triton``'s to say, so that both
halves say the same; nothing else of the runtime is used here.
"""
