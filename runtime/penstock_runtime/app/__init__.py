"""The serving process: the server with its ports and its end, and how a model is started and replaced."""
