{{/* Parts of the ThreeFSCluster, and values that it has no field for. */}}

{{- define "fire-flyer.cluster-service" -}}
resources:
  {{- range $kind, $amounts := pick .resources "requests" "limits" }}
  {{ $kind }}:
    {{- range $name, $amount := $amounts }}
    {{ $name }}: {{ $amount | toString | quote }}
    {{- end }}
  {{- end }}
nodeSelector: {{ toJson .nodeSelector }}
tolerations: {{ toJson .tolerations }}
{{- end }}

{{- define "fire-flyer.cluster-checks" -}}
{{- $threefs := .Values.threefs }}
{{- if not .Values.operator.threefsClusters }}
{{- fail "threefs.managedBy is Operator, but operator.threefsClusters is false: set it to true, so that the operator runs the ThreeFSCluster" }}
{{- end }}
{{- $only := list }}
{{- range $kind, $port := dict "mgmtd" 9000 "meta" 9001 "storage" 9002 }}
{{- $values := index $threefs $kind }}
{{- if ne (int $values.port) $port }}{{ $only = append $only (printf "threefs.%s.port" $kind) }}{{ end }}
{{- if $values.affinity }}{{ $only = append $only (printf "threefs.%s.affinity" $kind) }}{{ end }}
{{- if $values.volume.hostPath }}{{ $only = append $only (printf "threefs.%s.volume.hostPath" $kind) }}{{ end }}
{{- end }}
{{- if ne (int $threefs.nodeFailureMs) 10000 }}{{ $only = append $only "threefs.nodeFailureMs" }}{{ end }}
{{- if include "fire-flyer.located" . }}{{ $only = append $only "threefs.storage.topology" }}{{ end }}
{{- if and (not (include "fire-flyer.store" .)) (ne $threefs.mgmtd.volume.storageClass $threefs.meta.volume.storageClass) }}
{{- $only = append $only "threefs.meta.volume.storageClass (other than that of mgmtd)" }}
{{- end }}
{{- if $only }}
{{- fail (printf "a ThreeFSCluster has no field for %s: set threefs.managedBy to Chart, or remove these values" (join ", " $only)) }}
{{- end }}
{{- end }}
