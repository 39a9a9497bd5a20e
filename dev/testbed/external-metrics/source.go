package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/metrics/pkg/apis/external_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"
)

// The provider of the metrics that the rules name.
type source struct {
	rules      map[string]rule
	prometheus client
}

func (s *source) ListAllExternalMetrics() []provider.ExternalMetricInfo {
	var known []provider.ExternalMetricInfo
	for name := range s.rules {
		known = append(known, provider.ExternalMetricInfo{Metric: name})
	}
	return known
}

func (s *source) GetExternalMetric(
	ctx context.Context, namespace string, selector labels.Selector, info provider.ExternalMetricInfo,
) (*external_metrics.ExternalMetricValueList, error) {
	rule, known := s.rules[info.Metric]
	if !known {
		return nil, provider.NewMetricNotFoundError(external_metrics.Resource("externalmetrics"), info.Metric)
	}
	expression, err := rule.expression(namespace, selector)
	if err != nil {
		return nil, errors.NewBadRequest(err.Error())
	}
	samples, err := s.prometheus.query(ctx, expression)
	if err != nil {
		return nil, errors.NewInternalError(err)
	}
	found := &external_metrics.ExternalMetricValueList{}
	for _, one := range samples {
		if math.IsNaN(one.value) || math.IsInf(one.value, 0) {
			return nil, errors.NewInternalError(fmt.Errorf("%s is %g", expression, one.value))
		}
		found.Items = append(found.Items, external_metrics.ExternalMetricValue{
			MetricName:   info.Metric,
			MetricLabels: one.labels,
			Timestamp:    metav1.NewTime(one.time),
			Value:        *resource.NewMilliQuantity(int64(math.Round(one.value*1000)), resource.DecimalSI),
		})
	}
	return found, nil
}

// A client of Prometheus' HTTP API.
type client struct{ url string }

type sample struct {
	labels map[string]string
	time   time.Time
	value  float64
}

type answer struct {
	Status string `json:"status"`
	Error  string `json:"error"`
	Data   struct {
		Result []struct {
			Metric map[string]string  `json:"metric"`
			Value  [2]json.RawMessage `json:"value"`
		} `json:"result"`
	} `json:"data"`
}

// The samples of an instant query whose result is a vector.
func (c client) query(ctx context.Context, expression string) ([]sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	address := c.url + "/api/v1/query?" + url.Values{"query": {expression}}.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var read answer
	if err := json.NewDecoder(response.Body).Decode(&read); err != nil {
		return nil, fmt.Errorf("Prometheus answers %s: %w", response.Status, err)
	}
	if read.Status != "success" {
		return nil, fmt.Errorf("Prometheus answers %s to %s: %s", response.Status, expression, read.Error)
	}
	var samples []sample
	for _, result := range read.Data.Result {
		var seconds float64
		var text string
		if err := json.Unmarshal(result.Value[0], &seconds); err != nil {
			return nil, err
		}
		if err := json.Unmarshal(result.Value[1], &text); err != nil {
			return nil, err
		}
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, err
		}
		samples = append(samples, sample{result.Metric, time.UnixMilli(int64(seconds * 1000)), value})
	}
	return samples, nil
}
