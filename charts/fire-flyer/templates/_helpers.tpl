{{/* What every template shares: names, labels, images, security contexts. */}}

{{- define "fire-flyer.labels" -}}
{{ include "fire-flyer.selector" . }}
app.kubernetes.io/part-of: fire-flyer
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that never change: a Deployment's selector is immutable. */}}
{{- define "fire-flyer.selector" -}}
app.kubernetes.io/name: fire-flyer
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* metadata of an object: dict root component name [cluster: true for what has no namespace] */}}
{{- define "fire-flyer.metadata" -}}
name: {{ .name }}
{{- if not .cluster }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "fire-flyer.labels" . | nindent 2 }}
{{- end }}

{{/* The images that the chosen components use and that have no digest. */}}
{{- define "fire-flyer.images-by-tag" -}}
{{- $used := list }}
{{- with .Values }}
{{- if .operator.enabled }}{{ $used = concat $used (list "controller" "collectives") }}{{ end }}
{{- if .nodeAgent.enabled }}{{ $used = append $used "nodeAgent" }}{{ end }}
{{- if or .threefs.enabled .csi.enabled }}{{ $used = append $used "storage" }}{{ end }}
{{- if .csi.enabled }}{{ $used = concat $used (list "csiProvisioner" "csiResizer" "csiNodeDriverRegistrar" "csiLivenessProbe") }}{{ end }}
{{- if and .csi.enabled .csi.snapshots.enabled }}{{ $used = append $used "csiSnapshotter" }}{{ end }}
{{- end }}
{{- $missing := list }}
{{- range $used }}
{{- if not (index $.Values.images .).digest }}{{ $missing = append $missing . }}{{ end }}
{{- end }}
{{- join ", " $missing }}
{{- end }}

{{/* An image's reference: dict root image */}}
{{- define "fire-flyer.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- $registry := .root.Values.global.imageRegistry | default $image.registry | default .root.Values.images.registry -}}
{{- if not $registry }}
{{- fail (printf "images.registry is empty: no registry serves %s; build the images (images/*.Containerfile), push them to a registry of yours and set images.registry to it" $image.repository) }}
{{- end }}
{{- if and (not $image.digest) (not .root.Values.images.allowTags) }}
{{- fail (printf "images without a digest: %s. A tag can be moved by any account that may push to the registry, and these run on every node, some of them privileged: set images.NAME.digest of each to what the push reported (sha256:…), or images.allowTags to true for development" (include "fire-flyer.images-by-tag" .root)) }}
{{- end }}
{{- $registry }}/{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "fire-flyer.container-image" -}}
image: {{ include "fire-flyer.image" . }}
imagePullPolicy: {{ (index .root.Values.images .image).pullPolicy }}
{{- end }}

{{/* Where a pod may run: dict root values (the component's) [priorityClass] */}}
{{- define "fire-flyer.placement" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClass }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity | default .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Replicas keep apart: dict root component [required: true] */}}
{{- define "fire-flyer.apart" -}}
podAntiAffinity:
  {{- if .required }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "fire-flyer.selector" . | nindent 10 }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "fire-flyer.selector" . | nindent 12 }}
  {{- end }}
{{- end }}

{{/* Pod Security "restricted": for the pod and for the container. */}}
{{- define "fire-flyer.restricted-pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "fire-flyer.restricted-container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Addresses of 3FS that clients use; names are the same from every namespace. */}}
{{- define "fire-flyer.mgmtd-address" -}}
threefs-mgmtd.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ .Values.threefs.mgmtd.port }}
{{- end }}

{{- define "fire-flyer.meta-address" -}}
threefs-meta.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ .Values.threefs.meta.port }}
{{- end }}

{{- define "fire-flyer.key-secret" -}}
{{ .Values.threefs.existingKeySecret | default "threefs-key" }}
{{- end }}

{{/* A disruption budget: with one replica that one may go, so that no drain hangs. dict root component name */}}
{{- define "fire-flyer.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "fire-flyer.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # Otherwise a second pod that does not start could be neither replaced nor moved.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "fire-flyer.selector" . | nindent 6 }}
{{- end }}

{{/* Binds the role with a component's name to its service account: dict root component name [cluster] */}}
{{- define "fire-flyer.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ if .cluster }}ClusterRoleBinding{{ else }}RoleBinding{{ end }}
metadata:
  {{- include "fire-flyer.metadata" . | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ if .cluster }}ClusterRole{{ else }}Role{{ end }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .name }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
