"""Leader election with a coordination.k8s.io Lease."""
