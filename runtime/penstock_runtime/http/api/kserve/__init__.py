"""KServe's protocols V1 and v2."""
