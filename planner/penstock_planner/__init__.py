"""Compares hardware for an endpoint: which class, how many cores, how many replicas, at what cost. Pure functions.

    evidence   capacity of one replica: measured, published or estimated, with its interval
    processors speed of one class of processors against another, and its error
    project    what this project has measured itself, as evidence
    offers     hardware classes, prices and evidence -> what can be bought
    compare    offers and a load -> a comparison, with the reason why each offer lost
    page       a comparison as text, JSON, CSV and an HTML page
    ledger     predictions and later measurements

The autoscaler computes the number of replicas: `penstock_operator.decide`.
"""
