{{/* Where a CSI container finds the cluster: cluster.json and the key, in one folder. */}}
{{- define "fire-flyer.csi-cluster" -}}
name: cluster
projected:
  defaultMode: 0440
  sources:
    {{- if .Values.csi.existingClusterSecret }}
    - secret: {name: {{ .Values.csi.existingClusterSecret }}}
    {{- else }}
    - configMap: {name: threefs-cluster}
    - secret:
        name: {{ include "fire-flyer.key-secret" . }}
        items: [{key: key, path: key}]
    {{- end }}
{{- end }}

{{- define "fire-flyer.csi-environment" -}}
- name: THREEFS_CLUSTER
  value: /etc/threefs/cluster.json
- name: THREEFS_LOG_LEVEL
  value: {{ .Values.csi.logLevel | quote }}
- name: THREEFS_METRICS_PORT
  value: {{ .Values.monitoring.port | quote }}
{{- end }}

{{/* Asks the driver over its socket, so that health is the driver's and not a port's: dict root socket */}}
{{- define "fire-flyer.csi-liveness" -}}
- name: liveness-probe
  {{- include "fire-flyer.container-image" (dict "root" .root "image" "csiLivenessProbe") | nindent 2 }}
  args: [--csi-address=/csi/csi.sock, --health-port=9808, --probe-timeout=10s]
  resources:
    {{- toYaml .values.sidecarResources | nindent 4 }}
  {{- include "fire-flyer.restricted-container" .root | nindent 2 }}
  volumeMounts:
    - {name: socket, mountPath: /csi}
{{- end }}

{{- define "fire-flyer.csi-probes" -}}
ports:
  - {name: healthz, containerPort: 9808}
  - {name: metrics, containerPort: {{ .Values.monitoring.port }}}
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
