// A stand-in for the CSI project's livenessprobe with the flags that charts use: a driver's Probe
// over HTTP. The original cannot be had as a Go module.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	port := flag.Int("health-port", 9808, "TCP port of /healthz")
	endpoint := flag.String("http-endpoint", "", "address of /healthz, in place of the port")
	timeout := flag.Duration("probe-timeout", time.Second, "how long the driver may take")
	flag.Int("v", 0, "ignored: verbosity")
	flag.Parse()
	connection, err := grpc.NewClient("unix:"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("/healthz", func(response http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), *timeout)
		defer cancel()
		answer, err := csi.NewIdentityClient(connection).Probe(ctx, &csi.ProbeRequest{})
		if err != nil || (answer.Ready != nil && !answer.Ready.Value) {
			http.Error(response, fmt.Sprintf("not ready: %v", err), http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(response, "ok")
	})
	listen := *endpoint
	if listen == "" {
		listen = fmt.Sprintf(":%d", *port)
	}
	log.Fatal(http.ListenAndServe(listen, nil))
}
