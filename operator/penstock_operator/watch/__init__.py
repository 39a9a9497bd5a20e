"""Watches the cluster: Kopf handlers, caches of objects, and reads of pods and job logs."""
