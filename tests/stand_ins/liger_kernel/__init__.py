"""A small liger-kernel: it replaces what the real one replaces, in the same places, with the same formulas computed by torch, so on a CPU too.

Signatures, defaults, what a function exchanges in the family's module and on the instance, and what its classes lack are those of release 0.8.5.
`transformers.monkey_patch.CALLS` counts what ran.
"""
