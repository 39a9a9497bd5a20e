"""The cluster as the operator sees it: a thin port, its one adapter, and caches of what it watches.

    port.ClusterPort     what the operator asks of an API server; everything above depends on this alone
    kubernetes           the adapter, over `kubernetes.aio`: retries, time-outs, server-side apply
    store, informer      what is known of a kind, and the watch that keeps it so

No decision is taken here: which objects should be there is the business of `penstock_operator.plan`.
"""
