"""text-embeddings-inference."""
