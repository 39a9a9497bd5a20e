"""Compiles encoders for AWS Inferentia: what to compile (`choice`), the process that does it (`child`), and the other
end of its calls (`session`). `penstock_optimizer.targets.neuron` runs the stages.

Not yet run on a device: the SDK's calls are the documented ones, tested against a stand-in.
"""
