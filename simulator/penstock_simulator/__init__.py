"""What would the autoscaler do with this traffic? A simulation of replicas as queues, and of those who scale them.

    replica   a replica as a queue, fitted to the endpoint's capacity curve
    traces    load over time, built in or from a CSV file
    fleet     every request through replicas that come and go
    scraper   what Prometheus would know of it
    policies  ours, and rivals
    run       one trace, one policy, one seed
    compare   all of them at equal replica-hours
    report    the comparison as a page and as figures

Nothing in the operator imports it; the command line does.
"""
