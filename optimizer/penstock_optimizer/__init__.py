"""Makes artefacts: export, candidates, guard, search, capacity, report.

Judges the very engines and tasks that serve.
"""

from penstock_runtime.no_telemetry import keep_libraries_silent

keep_libraries_silent()
