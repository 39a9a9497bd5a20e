"""Models with random weights: what speed depends on, without any download."""
