"""Facts: names, settings and observations of the cluster, as plain values. Nothing here reads or writes anything."""
