"""One optimisation from endpoint to artefact: stages, work folder, time budget, progress events."""
