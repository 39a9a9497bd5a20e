"""The autoscaler: reads the load of every endpoint that scales, decides the replica count, and publishes it to the
plan.

    read/history      readings of an endpoint's pods -> three-state metrics
    read/scrape       scrapes /metrics of runtime pods and gateways
    read/queries      PromQL over the runtime's metrics -> three-state metrics
    read/prometheus   queries a Prometheus
    read/target       describes an endpoint to the autoscaler, from the caches
    loop              for all endpoints at an interval: read, decide (`penstock_operator.decide`), publish
    canaries          the same for canaries

The plan writes the replica count: the autoscaler itself writes nothing to the cluster.
"""
