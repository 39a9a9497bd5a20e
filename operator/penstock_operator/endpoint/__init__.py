"""The pure part of the operator: an observation of an endpoint in, the desired objects and statuses out.

    EndpointSnapshot --plan()--> ReconcilePlan(apply, delete, status, optimized_status, events, requeue_seconds)

Nothing here reads the cluster, the clock or the environment, and nothing here imports kopf or kubernetes.
"""
