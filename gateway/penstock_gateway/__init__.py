"""The gateway of an endpoint: HAProxy, and a process that keeps HAProxy's servers equal to the endpoint's replicas.

    settings    environment variables of the pod
    config      settings -> HAProxy's configuration, pure; with hold.lua
    slices      EndpointSlices -> replicas, pure
    haproxy     HAProxy's socket; replicas and HAProxy's servers -> commands
    follow      list and watch of the EndpointSlices
    process     starts HAProxy, follows the slices, drains on SIGTERM

The standard library only: the image has HAProxy, Python and this. The reasons are in docs/decisions/gateway.md.
"""
