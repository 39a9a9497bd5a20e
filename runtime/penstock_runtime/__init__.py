"""Serves one artefact for one task over HTTP. Imports `penstock` and never the optimiser."""

from penstock_runtime.no_telemetry import keep_libraries_silent

keep_libraries_silent()
