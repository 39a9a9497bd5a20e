"""The operator: watches ModelEndpoints, has their models optimised, and keeps their pods as they should be.

plan/       pure: what was observed -> what is desired
autoscaler/ pure: demand and measured capacity -> replicas
cluster/    the thin port to the API
"""
