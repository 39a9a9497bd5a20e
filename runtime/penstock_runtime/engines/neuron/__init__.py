"""The Neuron engine: runs models that were compiled for AWS Inferentia. Not yet run on a device.

load     engine.py    reads neuron.json, starts the child, compares with fp32, gives an `Engine`
shapes   shapes.py    batches -> runs of compiled shapes, padding (pure)
copies   copies.py    which copy of the model takes the next run (pure)
errors   device_errors.py  kinds of failures, from the runtime's texts and codes (pure)
fence    fence.py     the comparison with fp32 before ready
process  process.py   the child process that owns the NeuronCores
worker   worker.py    its program: the only one that imports torch and AWS's packages
"""

from penstock_runtime.engines.neuron.engine import NeuronEngine, load

__all__ = ["NeuronEngine", "load"]
