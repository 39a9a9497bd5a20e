"""The autoscaler at work: reads the load of every endpoint that scales, has it judged, and tells the plan the number.

    exposition  the text of a runtime's /metrics -> a reading
    history     readings of an endpoint's pods -> three-state metrics
    scraper     asks the pods
    queries     PromQL over the runtime's metrics -> three-state metrics
    prometheus  asks a Prometheus
    target      what the autoscaler has to know of one endpoint, from the caches
    telling     which decisions are worth a write
    loop        a tick for all endpoints: read, decide, tell

The judgement is `penstock_operator.scaling.decide`; the one writer of the Deployment's replicas is the plan.
"""
