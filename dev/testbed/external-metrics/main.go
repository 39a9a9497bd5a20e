// A server of external.metrics.k8s.io over Prometheus, for tests of HorizontalPodAutoscalers.
//
// It is made from the library that prometheus-adapter and KEDA are made from, so that the API server, the aggregation
// layer and the HPA controller see what they see in a real cluster: discovery, TLS, delegated authentication and
// authorization. It reads the `externalRules` of prometheus-adapter's configuration, and refuses whatever else it is
// given: a rule that works here is one to paste there.
package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/component-base/logs"
	"k8s.io/klog/v2"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/cmd"
)

func main() {
	logs.InitLogs()
	defer logs.FlushLogs()
	if err := run(context.Background(), os.Args); err != nil {
		klog.ErrorS(err, "external-metrics ends")
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	adapter := &cmd.AdapterBase{Name: "external-metrics"}
	configuration := adapter.Flags().String("config", "", "configuration file of prometheus-adapter with externalRules")
	prometheus := adapter.Flags().String("prometheus-url", "http://127.0.0.1:9090", "where Prometheus answers")
	if err := adapter.Flags().Parse(arguments); err != nil {
		return err
	}
	text, err := os.ReadFile(*configuration)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	rules, err := readRules(text)
	if err != nil {
		return fmt.Errorf("%s: %w", *configuration, err)
	}
	adapter.WithExternalMetrics(&source{rules: rules, prometheus: client{url: *prometheus}})
	return adapter.Run(ctx)
}
