"""Cohere's reranking."""
