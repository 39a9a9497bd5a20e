"""The operator: reconciles ModelEndpoints. It runs optimisation jobs, deploys the runtime pods and scales them.

watch/     Kopf handlers, caches of objects, reports of pods
loop/      queue, workers, reconcile
plan/      pure: observation -> desired objects and statuses
scaling/   autoscaler: read the load, decide, publish
leader/    the Lease
cluster/   client of the API server, stores, informers
"""
