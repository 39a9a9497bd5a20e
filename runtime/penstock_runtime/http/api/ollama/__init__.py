"""Ollama."""
