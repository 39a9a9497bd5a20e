"""A real Kubernetes for the tests and for trying things out, built from its Go modules on the spot.

Two tiers: `control_plane` is etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback, ready in
seconds, wanting no privilege, as many side by side as one likes. `machine` is the whole thing on one machine: nodes
with containerd and the static CPU manager, Services, DNS. `fixtures` hands both to pytest; `python -m testbed` is for
people. What each program is told stands in pure functions (`programs`, `node_files`, `services`, `layout`); what
touches the machine is thin (`daemon`, `host`, `node`).
"""
