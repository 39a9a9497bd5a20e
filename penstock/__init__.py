"""The contract that all sides of Penstock share: resource types, artefact manifest, capacity model, names and units.

Light on purpose: pydantic and the standard library. Nothing here imports the runtime, the optimiser or the operator
(the command line in `penstock_cli` drives them, from the outside).
"""

__version__ = "0.2.0"
