"""The contract that all sides of Penstock share: resource types, artefact manifest, capacity model, names and units.

It imports pydantic, PyYAML and the standard library only, and no other package of Penstock.
"""

__version__ = "0.1.0"
