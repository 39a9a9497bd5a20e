"""The reconcile loop: event routing, work queue, reconcile, garbage collection."""
