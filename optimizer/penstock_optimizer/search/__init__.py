"""Chooses the recipe and the plan. Pure: measuring is injected, so that tests use cost models.

`recipes` lists the candidates and the order to build them in; `space` decides which recipes go on and which plans of
them are tried; `goal` compares measurements, noise included; `climb` searches the plans and stores the measurements.
"""
