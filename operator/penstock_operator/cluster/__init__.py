"""The client of the API server, and the stores and informers of watched kinds.

    api           kinds, and the interface ClusterPort that all other packages depend on
    kubernetes    its implementation over `kubernetes.aio`: retries, time-outs, server-side apply
    store         the facts of the objects of one kind
    informer      keeps a store up to date

Decisions about objects are made in `penstock_operator.endpoint`.
"""
