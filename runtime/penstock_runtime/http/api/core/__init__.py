"""Shared by the APIs: bodies, the model, text generation, conversations."""
