"""Optimisation: the OptimizedModel of a spec, its jobs and their outcome, and the jobs that remove artefacts."""
