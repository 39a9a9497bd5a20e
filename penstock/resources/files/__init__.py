"""Reads resources from files: YAML, problems with their remedies."""
