"""Families of models: each reads a configuration and the weights by their names."""
