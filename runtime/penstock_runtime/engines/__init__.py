"""Inference engines. They do not import each other, and each heavy library is imported in one of them only."""
