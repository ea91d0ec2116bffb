"""A small SGLang: the documented offline engine over any causal model of transformers, in this process and on a CPU.

It keeps to what the real one does with what it is given: the same signatures, refusals, answers and orders of calls; and it disturbs its process in
the same ways. Samples, log-probs and weights are computed by the model. It has no batches, no prefix cache, and no processes of its own.
"""

from sglang.engine import Engine

__all__ = ["Engine"]
