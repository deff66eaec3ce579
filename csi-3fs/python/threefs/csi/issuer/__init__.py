"""The issuer of tickets: part of the controller, asked by the node plugins over TLS.

It has the cluster's key. A node plugin has none: it proves with its own service account token which
node it runs on, and with the token of a pod that the pod mounts the volume there.

| module | what |
|---|---|
| `review` | who may have a ticket; pure |
| `kubernetes` | the API server's answers that this needs: token reviews, pods, claims, volumes |
| `server` | the port of the issuer |
| `client` | the node plugin's side |
"""
