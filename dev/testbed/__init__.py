"""A real Kubernetes for the tests and for trying things out, built from its Go modules on the spot.

Two tiers: `control_plane` is etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback, ready in
seconds, without privileges, and several can run at once. `machine` is a whole cluster on one machine: nodes with
containerd and the static CPU manager, Services, DNS. `fixtures` gives both to pytest; `python -m testbed` is the
command line. Arguments and files of each program come from pure functions (`programs`, `node_files`, `services`,
`layout`); the modules that change the machine are thin (`daemon`, `host`, `node`).
"""
