module penstock.dev/testbed/prometheus-operator

go 1.24.0

// For its CustomResourceDefinitions: nothing of it is built.
require github.com/prometheus-operator/prometheus-operator v0.85.0
