"""Control loop: caches of the cluster, the queue, and the reconciler that plans and writes."""
