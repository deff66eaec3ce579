"""Tickets: credentials for single volumes, issued by the controller and stored on nodes.

The issuer is part of the controller, which has the cluster's key; node plugins send requests to it
over TLS. A node plugin has no key: it proves its node with its own service account token, and with
the token of a pod that the pod mounts the volume there.

| module | contents |
|---|---|
| `key_issuer` | issuing with the cluster's key |
| `review` | authorization of ticket requests; pure |
| `kubernetes` | requests to the API server: token reviews, pods, claims, volumes |
| `issuer_server` | the port of the issuer |
| `issuer_client` | the node plugin's side |
| `ticket_store` | tickets of the mounted volumes of a node |
"""
