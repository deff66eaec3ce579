{{/* Whether nodes have labels with their zone or rack. */}}
{{- define "fire-flyer.located" -}}
{{- $topology := .Values.threefs.storage.topology }}
{{- if or $topology.zoneLabel $topology.rackLabel }}yes{{ end }}
{{- end }}

{{/* Init container that writes the zone and rack of the node. Only it has a token, and reads the labels of the
     node. Expects a dict with root and asRoot. */}}
{{- define "fire-flyer.locate" -}}
{{- $topology := .root.Values.threefs.storage.topology }}
- name: locate
  {{- include "fire-flyer.container-image" (dict "root" .root "image" "storage") | nindent 2 }}
  command: [threefs-service, locate]
  env:
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: THREEFS_ZONE_LABEL
      value: {{ $topology.zoneLabel | quote }}
    - name: THREEFS_RACK_LABEL
      value: {{ $topology.rackLabel | quote }}
    - name: THREEFS_LOCATION_FILE
      value: /location/location.json
  resources:
    requests: {cpu: 10m, memory: 48Mi}
    limits: {memory: 128Mi}
  {{- include "fire-flyer.restricted-container" .root | nindent 2 }}
    {{- if .asRoot }}
    # The pod has no group that could read the token.
    runAsUser: 0
    seccompProfile:
      type: RuntimeDefault
    {{- end }}
  volumeMounts:
    - {name: location, mountPath: /location}
    - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Variables with the location of the node. */}}
{{- define "fire-flyer.location-env" -}}
- name: THREEFS_HOST
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if include "fire-flyer.located" . }}
- name: THREEFS_LOCATION_FILE
  value: /location/location.json
{{- end }}
{{- end }}

{{- define "fire-flyer.location-volumes" -}}
- name: location
  emptyDir: {sizeLimit: 1Mi}
- name: token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
{{- end }}
