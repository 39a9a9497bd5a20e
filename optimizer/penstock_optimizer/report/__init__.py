"""The report of an optimisation, and the charts that other reports draw with too."""
