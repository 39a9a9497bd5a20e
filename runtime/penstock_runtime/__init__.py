"""Serves one artefact for one task over HTTP. Imports `penstock` and never the optimiser."""
