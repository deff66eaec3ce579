{{/* Rules for connections that our pods open; every one is a list item for a policy's `egress`. */}}

{{/* Names; a cluster's DNS pods may listen at another port than their Service (OpenShift: 5353). */}}
{{- define "fire-flyer.egress-dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    - {port: 5353, protocol: UDP}
    - {port: 5353, protocol: TCP}
  {{- with .Values.networkPolicies.egress.dnsTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The API server: its Service's port, and the one where it listens, which plugins see instead. */}}
{{- define "fire-flyer.egress-api-server" -}}
- ports:
    {{- range .Values.networkPolicies.egress.apiServerPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicies.egress.apiServerTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The services of 3FS. */}}
{{- define "fire-flyer.egress-threefs" -}}
{{- $root := . }}
{{- range $kind := list "mgmtd" "meta" "storage" }}
- to:
    - podSelector:
        matchLabels:
          {{- include "fire-flyer.selector" (dict "root" $root "component" (printf "threefs-%s" $kind)) | nindent 10 }}
  ports:
    - {port: {{ (index $root.Values.threefs $kind).port }}, protocol: TCP}
{{- end }}
{{- end }}

{{/* The members of etcd or the servers of PostgreSQL, at the configured ports. */}}
{{- define "fire-flyer.egress-store" -}}
{{- $ports := list }}
{{- range concat .Values.threefs.etcd.endpoints .Values.threefs.postgres.hosts }}
{{- $ports = append $ports (regexFind "[0-9]+$" . | int) }}
{{- end }}
{{- if $ports }}
- ports:
    {{- range uniq $ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- $egress := .Values.networkPolicies.egress }}
  {{- with eq (include "fire-flyer.store" .) "etcd" | ternary $egress.etcdTo $egress.postgresTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The 3FS services that the CSI driver uses: of this release, or at configured addresses. */}}
{{- define "fire-flyer.egress-csi-cluster" -}}
{{- if not .Values.csi.existingClusterSecret }}
{{- include "fire-flyer.egress-threefs" . }}
{{- else if .Values.networkPolicies.egress.threefsTo }}
- to:
    {{- toYaml .Values.networkPolicies.egress.threefsTo | nindent 4 }}
{{- else }}
- {}
{{- end }}
{{- end }}

{{/* Where node plugins get tickets. */}}
{{- define "fire-flyer.egress-issuer" -}}
{{- if .Values.csi.issuer.enabled }}
- to:
    - podSelector:
        matchLabels:
          {{- include "fire-flyer.selector" (dict "root" . "component" "csi-controller") | nindent 10 }}
  ports:
    - {port: {{ .Values.csi.issuer.port }}, protocol: TCP}
{{- end }}
{{- end }}

{{/* policyTypes and egress of a policy: dict root rules (templates' last names) [also (YAML)] */}}
{{- define "fire-flyer.egress" -}}
{{- if .root.Values.networkPolicies.egress.enabled }}
policyTypes: [Ingress, Egress]
egress:
  {{- range .rules }}
  {{- include (printf "fire-flyer.egress-%s" .) $.root | trim | nindent 2 }}
  {{- end }}
  {{- with .also }}
  {{- . | nindent 2 }}
  {{- end }}
{{- else }}
policyTypes: [Ingress]
{{- end }}
{{- end }}

{{/* Exporters next to the mgmtd of ThreeFSClusters, in any namespace. */}}
{{- define "fire-flyer.egress-exporters" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          app.kubernetes.io/name: fire-flyer
          app.kubernetes.io/component: threefs-mgmtd
  ports:
    - {port: {{ .Values.monitoring.port }}, protocol: TCP}
{{- end }}
