"""Objects that serve an endpoint: one module for each kind, or for kinds that are read together."""
