"""A loaded model and the server around it: prediction, warm-up, caches, start and shutdown."""
