{{/* What the pods of mgmtd, meta and the backup need to use etcd, and wrong combinations of values. */}}

{{/* "true" if a service (kind) keeps its rows in etcd: dict root kind */}}
{{- define "fire-flyer.in-etcd" -}}
{{- if and (ne .kind "storage") .root.Values.threefs.etcd.endpoints }}true{{ end }}
{{- end }}

{{- define "fire-flyer.etcd-env" -}}
{{- with .Values.threefs.etcd }}
- name: THREEFS_ETCD_ENDPOINTS
  value: {{ join "," .endpoints | quote }}
- name: THREEFS_ETCD_PREFIX
  value: {{ .prefix | quote }}
{{- if .tlsSecret }}
- name: THREEFS_ETCD_CA_FILE
  value: /etc/threefs-etcd/tls/ca.crt
{{- if .clientCertificate }}
- name: THREEFS_ETCD_CERT_FILE
  value: /etc/threefs-etcd/tls/tls.crt
- name: THREEFS_ETCD_KEY_FILE
  value: /etc/threefs-etcd/tls/tls.key
{{- end }}
{{- end }}
{{- if .user }}
- name: THREEFS_ETCD_USER
  value: {{ .user | quote }}
- name: THREEFS_ETCD_PASSWORD_FILE
  value: /etc/threefs-etcd/user/password
{{- end }}
{{- end }}
{{- end }}

{{- define "fire-flyer.etcd-mounts" -}}
{{- with .Values.threefs.etcd }}
{{- if .tlsSecret }}
- {name: etcd-tls, mountPath: /etc/threefs-etcd/tls, readOnly: true}
{{- end }}
{{- if .user }}
- {name: etcd-user, mountPath: /etc/threefs-etcd/user, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "fire-flyer.etcd-volumes" -}}
{{- with .Values.threefs.etcd }}
{{- if .tlsSecret }}
- name: etcd-tls
  secret:
    secretName: {{ .tlsSecret }}
    # Readable by the group of the pod only.
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      {{- if .clientCertificate }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
{{- end }}
{{- if .user }}
- name: etcd-user
  secret:
    secretName: {{ .passwordSecret }}
    defaultMode: 0440
    items: [{key: password, path: password}]
{{- end }}
{{- end }}
{{- end }}

{{- define "fire-flyer.etcd-checks" -}}
{{- $threefs := .Values.threefs }}
{{- with $threefs.etcd }}
{{- $secure := 0 }}
{{- range .endpoints }}{{ if hasPrefix "https:" . }}{{ $secure = add1 $secure }}{{ end }}{{ end }}
{{- if and $secure (ne (int $secure) (len .endpoints)) }}
{{- fail (printf "threefs.etcd.endpoints has http and https endpoints (%s): use https for all members" (join ", " .endpoints)) }}
{{- end }}
{{- if and $secure (not .tlsSecret) }}
{{- fail "threefs.etcd.endpoints are https, but threefs.etcd.tlsSecret is empty: set it to a Secret with the certificate authority of the members in ca.crt" }}
{{- end }}
{{- if and .tlsSecret (not $secure) }}
{{- fail "threefs.etcd.tlsSecret is set, but threefs.etcd.endpoints has no https endpoint: connections would not be encrypted. Use https endpoints, or remove tlsSecret" }}
{{- end }}
{{- if and .clientCertificate (not .tlsSecret) }}
{{- fail "threefs.etcd.clientCertificate needs threefs.etcd.tlsSecret with tls.crt and tls.key" }}
{{- end }}
{{- if ne (empty .user) (empty .passwordSecret) }}
{{- fail "threefs.etcd.user and threefs.etcd.passwordSecret must be set together" }}
{{- end }}
{{- if and .user (not .endpoints) }}
{{- fail "threefs.etcd.user is set, but threefs.etcd.endpoints is empty: name every member" }}
{{- end }}
{{- if and $threefs.backup.enabled (not .endpoints) }}
{{- fail "threefs.backup.enabled needs threefs.etcd.endpoints: rows on a volume can be read only inside the pod of their service (kubectl exec threefs-meta-0 -- threefs meta dump --data /data/meta --file /data/meta.dump)" }}
{{- end }}
{{- end }}
{{- $class := $threefs.backup.volume.storageClass }}
{{- if and $threefs.backup.enabled .Values.csi.enabled $class (eq $class .Values.csi.storageClass.name) }}
{{- fail (printf "threefs.backup.volume.storageClass is %s, which stores backups on the 3FS that they are needed to restore: use another one" $class) }}
{{- end }}
{{- end }}
