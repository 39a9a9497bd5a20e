"""Text generation: sequences, sampling and texts of tokens are pure; engines compute the logits of the next tokens.

`scheduler` decides what each step computes, `sampling` chooses tokens, `detokeniser` makes text of them, `loop` runs
the steps of a `StepEngine` (`penstock_runtime.engines`) on one thread.
"""
