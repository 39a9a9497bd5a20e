"""One optimisation from endpoint to artefact: stages, time budget, progress events, conclusions."""
