"""The accuracy gate: compares the answers of a candidate and of the fp32 reference, alone and in batches. No labels.

`gate.observe_reference` runs the judging requests through the reference once. `gate.judge_candidate` runs them through
a candidate, with the tasks and engines that serve, and returns the verdict with its evidence.
"""
