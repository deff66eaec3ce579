{{/*
One service of 3FS: a headless Service and a StatefulSet.
dict root kind (mgmtd, meta, storage) values replicas required advertise env
*/}}
{{- define "fire-flyer.threefs" }}
{{- $name := printf "threefs-%s" .kind }}
{{- $shared := and (ne .kind "storage") (include "fire-flyer.store" .root) }}
{{- $component := dict "root" .root "component" $name "name" $name "required" .required }}
{{- /* Numbers of the disks after the first. */}}
{{- $further := untilStep 1 (int (default 1 .values.disks)) 1 }}
apiVersion: v1
kind: Service
metadata:
  {{- include "fire-flyer.metadata" $component | nindent 2 }}
spec:
  clusterIP: None
  # A service must find its peers before it can be ready.
  publishNotReadyAddresses: true
  selector:
    {{- include "fire-flyer.selector" $component | nindent 4 }}
  ports:
    - {name: {{ .kind }}, port: {{ .values.port }}, targetPort: {{ .kind }}, protocol: TCP}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "fire-flyer.metadata" $component | nindent 2 }}
spec:
  serviceName: {{ $name }}
  replicas: {{ .replicas }}
  revisionHistoryLimit: 3
  podManagementPolicy: Parallel
  # One pod at a time: a chain keeps its other replicas while one restarts.
  updateStrategy: {type: RollingUpdate}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Retain}
  selector:
    matchLabels:
      {{- include "fire-flyer.selector" $component | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "fire-flyer.labels" $component | nindent 8 }}
    spec:
      serviceAccountName: threefs
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 30
      {{- $apart := include "fire-flyer.apart" $component | fromYaml }}
      {{- include "fire-flyer.placement" (dict "root" .root "values" .values "priorityClass" .root.Values.priorityClasses.storage "affinity" $apart) | nindent 6 }}
      {{- if and .values.volume.hostPath (not $shared) }}
      # A hostPath belongs to root; it is meant for tests and for disks that an administrator prepares.
      securityContext:
        runAsUser: 0
        seccompProfile:
          type: RuntimeDefault
      {{- else }}
      {{- include "fire-flyer.restricted-pod" . | nindent 6 }}
      {{- end }}
      {{- $located := and (eq .kind "storage") (include "fire-flyer.located" .root) }}
      {{- if $located }}
      initContainers:
        {{- include "fire-flyer.locate" (dict "root" .root) | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .kind }}
          {{- include "fire-flyer.container-image" (dict "root" .root "image" "storage") | nindent 10 }}
          command: [threefs-service, {{ .kind }}]
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: THREEFS_LISTEN
              value: 0.0.0.0:{{ .values.port }}
            {{- with .advertise }}
            # The name of a pod is stable, its address is not.
            - name: THREEFS_ADVERTISE
              value: {{ . }}
            {{- end }}
            {{- if eq .kind "storage" }}
            {{- include "fire-flyer.location-env" .root | nindent 12 }}
            {{- end }}
            {{- if $shared }}
            {{- include "fire-flyer.store-env" .root | nindent 12 }}
            {{- else }}
            - name: THREEFS_DATA
              value: /data
            {{- end }}
            {{- with $further }}
            - name: THREEFS_DISKS
              value: /disks/{{ join ":/disks/" . }}
            {{- end }}
            - name: THREEFS_KEY_FILE
              value: /etc/threefs/key
            - name: THREEFS_TLS
              value: {{ .root.Values.threefs.tls.enabled | quote }}
            - name: THREEFS_TLS_TRANSITION
              value: {{ .root.Values.threefs.tls.transition | quote }}
            {{- range $name, $value := .env }}
            - name: {{ $name }}
              value: {{ $value | quote }}
            {{- end }}
          ports:
            - {name: {{ .kind }}, containerPort: {{ .values.port }}}
          # Liveness depends only on this port: failures of other services must not restart this one.
          livenessProbe:
            tcpSocket: {port: {{ .kind }}}
            periodSeconds: 20
            timeoutSeconds: 10
            failureThreshold: 6
          readinessProbe:
            {{- if eq .kind "mgmtd" }}
            tcpSocket: {port: {{ .kind }}}
            periodSeconds: 10
            timeoutSeconds: 5
            {{- else }}
            # It starts a process, so the period and the timeout are long.
            exec: {command: [threefs-service, check, {{ .kind }}, --ready]}
            periodSeconds: 15
            timeoutSeconds: 30
            {{- end }}
          startupProbe:
            tcpSocket: {port: {{ .kind }}}
            periodSeconds: 2
            timeoutSeconds: 5
            failureThreshold: 300
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          {{- include "fire-flyer.restricted-container" . | nindent 10 }}
          volumeMounts:
            {{- if $shared }}
            {{- include "fire-flyer.store-mounts" .root | nindent 12 }}
            {{- else }}
            - name: data
              mountPath: /data
              {{- if .values.volume.hostPath }}
              # Separate folders, because two services may run on one node.
              subPathExpr: $(POD_NAME)
              {{- end }}
            {{- end }}
            {{- range $further }}
            - {name: disk-{{ . }}, mountPath: /disks/{{ . }}}
            {{- end }}
            - {name: cluster, mountPath: /etc/threefs, readOnly: true}
            {{- if $located }}
            - {name: location, mountPath: /location, readOnly: true}
            {{- end }}
            - {name: tmp, mountPath: /tmp}
        {{- if eq .kind "mgmtd" }}
        - name: metrics
          {{- include "fire-flyer.container-image" (dict "root" .root "image" "storage") | nindent 10 }}
          command: [python3, -m, threefs.exporter]
          env:
            - name: THREEFS_CLUSTER
              value: /etc/threefs/cluster.json
            - name: THREEFS_METRICS_PORT
              value: {{ .root.Values.monitoring.port | quote }}
          ports:
            - {name: metrics, containerPort: {{ .root.Values.monitoring.port }}}
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 30
            timeoutSeconds: 10
            failureThreshold: 6
          resources:
            {{- toYaml .root.Values.threefs.mgmtd.metricsResources | nindent 12 }}
          {{- include "fire-flyer.restricted-container" . | nindent 10 }}
          volumeMounts:
            - {name: cluster, mountPath: /etc/threefs, readOnly: true}
            - {name: tmp, mountPath: /tmp}
        {{- end }}
      volumes:
        - name: cluster
          projected:
            # Readable by the group of the pod only.
            defaultMode: 0440
            sources:
              - configMap: {name: threefs-cluster}
              - secret:
                  name: {{ include "fire-flyer.key-secret" .root }}
                  items: [{key: key, path: key}]
        {{- if $located }}
        {{- include "fire-flyer.location-volumes" . | nindent 8 }}
        {{- end }}
        - name: tmp
          emptyDir: {sizeLimit: 64Mi}
        {{- if $shared }}
        {{- include "fire-flyer.store-volumes" .root | nindent 8 }}
        {{- else if .values.volume.hostPath }}
        - name: data
          hostPath: {path: {{ .values.volume.hostPath }}, type: DirectoryOrCreate}
        {{- end }}
  {{- if not (or $shared .values.volume.hostPath) }}
  volumeClaimTemplates:
    {{- range $disk := prepend $further 0 }}
    - metadata:
        name: {{ if $disk }}disk-{{ $disk }}{{ else }}data{{ end }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $.values.volume.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $.values.volume.size }}
    {{- end }}
  {{- end }}
{{- end }}
