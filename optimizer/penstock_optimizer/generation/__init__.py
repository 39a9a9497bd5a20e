"""Text generation: judges and measures the candidates of a decoder, and chooses the plan that is served."""
