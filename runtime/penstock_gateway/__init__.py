"""The gateway of an endpoint: HAProxy, and a small process beside it that tells HAProxy which pods there are.

    settings    what the pod's environment says
    config      settings -> HAProxy's configuration, pure; hold.lua is its companion
    slices      EndpointSlices -> the servers there should be, pure
    roster      the servers there should be, and those that HAProxy has -> what to tell it, pure
    control     HAProxy's socket
    follow      the API server's watch
    process     starts HAProxy, follows, drains on SIGTERM

The standard library only: the image has HAProxy, Python and this. docs/decisions/gateway.md says why it is so.
"""
