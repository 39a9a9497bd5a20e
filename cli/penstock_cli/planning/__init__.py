"""`penstock plan`: what it reads of files and clusters, and how a plan is verified."""
