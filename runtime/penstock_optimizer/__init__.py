"""Makes artefacts: export, candidates, guard, search, capacity, report.

Judges the very engines and tasks that serve.
"""
