"""Programs of other projects, built from the Go modules under `go/`, each at one version."""
