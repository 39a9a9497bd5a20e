"""Facts: names, settings and what was read from the cluster, as plain values. Nothing here reads or writes anything."""
