"""`penstock plan`: reads objects from files and clusters, and verifies a plan."""
