"""Text generation: sequences, sampling and texts of tokens are pure; engines compute the logits of the next tokens.

`scheduler` decides what each step computes, `sampling` chooses tokens, `detokeniser` makes text of them, `loop` runs
the steps on one thread. Engines implement `engine.StepEngine`: `openvino_engine` and `native_engine`; `open` opens that
of an artefact.
"""
