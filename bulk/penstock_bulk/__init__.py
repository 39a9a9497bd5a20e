"""Models in the user's own process: the Python API (`penstock.load`)."""
