{{/* Volume with the configured clusters: one folder each, with cluster.json and the key. */}}
{{- define "fire-flyer.csi-cluster" -}}
name: cluster
projected:
  defaultMode: 0440
  sources:
    {{- if .Values.csi.existingClusterSecret }}
    - secret:
        name: {{ .Values.csi.existingClusterSecret }}
        items: [{key: cluster.json, path: default/cluster.json}, {key: key, path: default/key}]
    {{- else }}
    - configMap:
        name: threefs-cluster
        items: [{key: cluster.json, path: default/cluster.json}]
    - secret:
        name: {{ include "fire-flyer.key-secret" . }}
        items: [{key: key, path: default/key}]
    {{- end }}
{{- end }}

{{/* Whether node plugins have the cluster's key: for inline volumes, which they create themselves, and
     if no issuer is configured. */}}
{{- define "fire-flyer.csi-node-key" -}}
{{- if or .Values.csi.inline.enabled (not .Values.csi.issuer.enabled) }}yes{{ end }}
{{- end }}

{{- define "fire-flyer.issuer-secret" -}}
{{ .Values.csi.issuer.existingSecret | default "threefs-issuer" }}
{{- end }}

{{- define "fire-flyer.issuer-host" -}}
threefs-issuer.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{/* Labels of the nodes on which volumes are accessible, KEY=VALUE with commas. */}}
{{- define "fire-flyer.csi-topology" -}}
{{- $labels := list }}
{{- range $key := .Values.csi.topologyKeys }}
{{- if not (hasKey $.Values.csi.node.nodeSelector $key) }}
{{- fail (printf "csi.topologyKeys has %s, which csi.node.nodeSelector does not have: volumes would be restricted to nodes with a label that nodes with the node plugin may lack. Add the label to csi.node.nodeSelector and csi.mountManager.nodeSelector, or remove the key" $key) }}
{{- end }}
{{- $labels = append $labels (printf "%s=%s" $key (index $.Values.csi.node.nodeSelector $key)) }}
{{- end }}
{{- join "," $labels }}
{{- end }}

{{- define "fire-flyer.csi-environment" -}}
{{- with include "fire-flyer.csi-topology" . }}
- name: THREEFS_TOPOLOGY
  value: {{ . | quote }}
{{- end }}
- name: THREEFS_TICKET_SECONDS
  value: {{ .Values.csi.issuer.ticketSeconds | quote }}
- name: THREEFS_LOG_LEVEL
  value: {{ .Values.csi.logLevel | quote }}
- name: THREEFS_METRICS_PORT
  value: {{ .Values.monitoring.port | quote }}
{{- end }}

{{/* Liveness probe through the driver's socket: an open port would not show that the driver works.
     Expects a dict with root and values. */}}
{{- define "fire-flyer.csi-liveness" -}}
- name: liveness-probe
  {{- include "fire-flyer.container-image" (dict "root" .root "image" "csiLivenessProbe") | nindent 2 }}
  args: [--csi-address=/csi/csi.sock, --health-port=9808, --probe-timeout=10s]
  resources:
    {{- toYaml .values.sidecarResources | nindent 4 }}
  {{- include "fire-flyer.restricted-container" .root | nindent 2 }}
    {{- if .asRoot }}
    # The socket in the kubelet's folder belongs to root.
    runAsUser: 0
    {{- end }}
  volumeMounts:
    - {name: socket, mountPath: /csi}
{{- end }}

{{- define "fire-flyer.csi-probes" -}}
ports:
  - {name: healthz, containerPort: 9808}
  - {name: metrics, containerPort: {{ .root.Values.monitoring.port }}}
  {{- with .issuer }}
  - {name: issuer, containerPort: {{ . }}}
  {{- end }}
livenessProbe:
  httpGet: {path: /healthz, port: healthz}
  periodSeconds: 30
  timeoutSeconds: 15
  failureThreshold: 5
readinessProbe:
  httpGet: {path: /healthz, port: healthz}
  periodSeconds: 5
  timeoutSeconds: 15
startupProbe:
  httpGet: {path: /healthz, port: healthz}
  periodSeconds: 2
  timeoutSeconds: 15
  failureThreshold: 90
{{- end }}

{{/* Checks that a socket of this node is served. Expects its name: mount-manager or fd-store. */}}
{{- define "fire-flyer.mount-manager-probe" -}}
import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(9); s.connect('/run/threefs-mount-manager/{{ . }}.sock')
{{- end }}
