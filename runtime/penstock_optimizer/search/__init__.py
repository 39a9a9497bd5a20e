"""The search: which recipe and which plan. Pure: what measures is injected, so that tests use cost models.

`goal` says when one measurement is better than another, noise included; `survivors` sorts candidates by verdict and
speed (stage 1); `space` lists the plans next to a plan; `climb` walks them (stage 2); `trials` remembers what was
measured, so that an interrupted search goes on.
"""
