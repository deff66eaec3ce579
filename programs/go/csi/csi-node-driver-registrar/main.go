// A stand-in for the CSI project's node-driver-registrar with the flags that charts use: it serves
// the kubelet's plugin registration for one driver. The original cannot be had as a Go module.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type server struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (s *server) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: s.name, Endpoint: s.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (s *server) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Fatalf("the kubelet refused %s: %s", s.name, status.Error)
	}
	log.Printf("registered %s", s.name)
	return &registration.RegistrationStatusResponse{}, nil
}

// driverName asks the driver until it answers: its container may start later than this one.
func driverName(address string) string {
	connection, err := grpc.NewClient("unix:"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		log.Fatalf("no answer from the driver at %s: %v", address, err)
	}
	return info.Name
}

// serveHealth is well as long as the kubelet finds the socket, as the original is.
func serveHealth(address, socket string) {
	http.HandleFunc("/healthz", func(answer http.ResponseWriter, _ *http.Request) {
		if _, err := os.Stat(socket); err != nil {
			http.Error(answer, err.Error(), http.StatusInternalServerError)
		}
	})
	log.Fatal(http.ListenAndServe(address, nil))
}

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket, as this container sees it")
	endpoint := flag.String("kubelet-registration-path", "", "the driver's socket, as the kubelet sees it")
	folder := flag.String("plugin-registration-path", "/registration", "the kubelet's plugins_registry")
	flag.Int("v", 0, "ignored: verbosity")
	health := flag.String("http-endpoint", "", "where /healthz is served; empty: nowhere")
	flag.Duration("timeout", time.Second, "ignored")
	flag.Parse()
	name := driverName(*address)
	socket := filepath.Join(*folder, name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	if *health != "" {
		go serveHealth(*health, socket)
	}
	serving := grpc.NewServer()
	registration.RegisterRegistrationServer(serving, &server{name: name, endpoint: *endpoint})
	log.Printf("serving %s for %s", socket, *endpoint)
	log.Fatal(serving.Serve(listener))
}
