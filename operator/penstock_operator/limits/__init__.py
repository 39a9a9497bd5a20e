"""Limits of namespaces and of the cluster: quotas, and the number of optimisations and rollouts at a time."""
