"""Compares hardware for an endpoint: which class, how many cores, how many replicas, at what cost. Pure functions.

    evidence   capacity of one replica: measured, published or estimated, with its interval
    offers     hardware classes, prices and evidence -> what can be bought
    compare    offers and a load -> a comparison, with the reason why each offer lost
    page       a comparison as text, JSON, CSV and an HTML page
    ledger     predictions and what was measured afterwards

The number of replicas is that of the autoscaler: `penstock_operator.decide`.
"""
