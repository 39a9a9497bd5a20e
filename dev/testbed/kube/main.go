// One binary for a whole Kubernetes: etcd, the control plane, the node's programs and kubectl.
//
// Linked together they are 140 MB instead of 600 and build in one go. Which one runs is chosen by the name that
// the binary is called by (a symbolic link) or, called as "kube", by the first argument.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs run their command; etcd has a main function of its own and reads the arguments itself.
var programs = map[string]func(arguments []string){
	"etcd":                    etcdmain.Main,
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(controllermanager.NewControllerManagerCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kube-proxy":              run(proxy.NewProxyCommand),
	"kubectl":                 run(kubectl.NewDefaultKubectlCommand),
}

// run builds the command only when it is called: each registers flags of its own.
func run(newCommand func() *cobra.Command) func([]string) {
	return func([]string) { os.Exit(cli.Run(newCommand())) }
}

func main() {
	name := filepath.Base(os.Args[0])
	if _, linked := programs[name]; !linked && len(os.Args) > 1 {
		os.Args = os.Args[1:] // the commands look at os.Args themselves
		name = os.Args[0]
	}
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "usage: kube {%s} [arguments]\n", strings.Join(names(), "|"))
		os.Exit(2)
	}
	program(os.Args)
}

func names() []string {
	all := make([]string, 0, len(programs))
	for name := range programs {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
