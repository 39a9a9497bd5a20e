"""A stand-in for the AWS Neuron SDK, for tests only: no Neuron device, compiler or library is behind it.

It enforces the documented contract of `torch_neuronx` 2.9 (Inf2) and `torch_neuron` 1.13 (Inf1): signatures, errors,
compiler flags, fixed shapes, and one owner for each NeuronCore. It runs models on the CPU. `install` writes one
generation into a folder for `PYTHONPATH` and `PATH`. README.md lists its functions and its differences.
"""

LABEL = "stand-in: simulated, no Neuron device"
"""In each output of the stand-in."""
