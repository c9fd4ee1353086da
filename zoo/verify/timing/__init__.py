"""Is a layer faster? Paired timings over fresh processes, and a verdict that says when it cannot be told.

A layer, the stock layer, the stock layer once more and the stock layer compiled run in blocks of random order (ABBA),
in fresh processes whose order of imports alternates. Every call has new values at new addresses, behind a cache that
was overwritten (cold) or holds the call's inputs (warm); on a GPU behind a spinning kernel, that hides its launch. A
layer that takes the host over twice as long as stock meanwhile, and longer by more than it saves, is not called FASTER.
Three clocks must agree: events, CUPTI (in two of the processes) and the parent process's own (on a CPU perf_counter,
processor time and the parent's). What the timed calls returned is compared with float64, and must not change once it is
returned.

:mod:`~zoo.verify.timing.cases` says what is timed of each kind, :mod:`~zoo.verify.timing.plan` how often,
:mod:`~zoo.verify.timing.contest` does it in the worker, :mod:`~zoo.verify.timing.running` asks for it,
:mod:`~zoo.verify.timing.pairs` and :mod:`~zoo.verify.timing.judging` make verdicts of the recorded times, as pure
functions.
"""
