package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"text/template"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/yaml"
)

type configuration struct {
	ExternalRules []struct {
		SeriesQuery  string `json:"seriesQuery"`
		MetricsQuery string `json:"metricsQuery"`
		Resources    struct {
			Namespaced *bool `json:"namespaced,omitempty"`
			Overrides  map[string]struct {
				Resource string `json:"resource"`
			} `json:"overrides,omitempty"`
		} `json:"resources"`
	} `json:"externalRules"`
}

// A rule maps a series to a query.
type rule struct {
	series string
	// Label that must equal the namespace of the request; empty: all series are visible.
	namespaceLabel string
	query          *template.Template
}

// What prometheus-adapter offers to metricsQuery, of its fields those that mean something for external metrics.
type fields struct {
	Series        string
	LabelMatchers string
}

var seriesName = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?$`)

func readRules(text []byte) (map[string]rule, error) {
	var read configuration
	if err := yaml.UnmarshalStrict(text, &read); err != nil {
		return nil, err
	}
	rules := map[string]rule{}
	for _, entry := range read.ExternalRules {
		name := seriesName.FindStringSubmatch(entry.SeriesQuery)
		if name == nil {
			return nil, fmt.Errorf("seriesQuery %q: only a name with matchers is understood here", entry.SeriesQuery)
		}
		query, err := template.New(name[1]).Delims("<<", ">>").Option("missingkey=error").Parse(entry.MetricsQuery)
		if err != nil {
			return nil, fmt.Errorf("metricsQuery of %s: %w", name[1], err)
		}
		made := rule{series: name[1], query: query}
		if entry.Resources.Namespaced == nil || *entry.Resources.Namespaced {
			for label, override := range entry.Resources.Overrides {
				if override.Resource == "namespace" {
					made.namespaceLabel = label
				}
			}
			if made.namespaceLabel == "" {
				return nil, fmt.Errorf("%s: resources.overrides has no label for the namespace", name[1])
			}
		}
		rules[name[1]] = made
	}
	if len(rules) == 0 {
		return nil, fmt.Errorf("no externalRules")
	}
	return rules, nil
}

// What Prometheus is to be asked for a metric in a namespace.
func (r rule) expression(namespace string, selector labels.Selector) (string, error) {
	var matchers []string
	requirements, _ := selector.Requirements()
	for _, requirement := range requirements {
		values := requirement.Values().List()
		switch operator := requirement.Operator(); {
		case operator == selection.Equals && len(values) == 1:
			matchers = append(matchers, fmt.Sprintf("%s=%q", requirement.Key(), values[0]))
		case operator == selection.In:
			matchers = append(matchers, fmt.Sprintf("%s=~%q", requirement.Key(), strings.Join(values, "|")))
		default:
			return "", fmt.Errorf("the operator %s of %s is not understood here", operator, requirement.Key())
		}
	}
	if r.namespaceLabel != "" {
		matchers = append(matchers, fmt.Sprintf("%s=%q", r.namespaceLabel, namespace))
	}
	var text bytes.Buffer
	err := r.query.Execute(&text, fields{Series: r.series, LabelMatchers: strings.Join(matchers, ",")})
	return text.String(), err
}
