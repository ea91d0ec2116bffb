"""Pure mathematics: tensors and numbers in, tensors and numbers out.

Nothing here has heard of a recipe, a process group, a file or a clock, and every denominator is an argument. `keyed`, `batchmath` and `stats`
import no torch, so that rooms which must stay light may use them; the other files do. For the same reason this file imports nothing.

Notation: C scored completions of a step, N trained tokens of a micro-batch, T sampled tokens of one completion, B rows, S positions, V words.
"""
