module penstock.dev/testbed/gateway-api

go 1.24.0

// For its CustomResourceDefinitions: nothing of it is built.
require sigs.k8s.io/gateway-api v1.4.1
