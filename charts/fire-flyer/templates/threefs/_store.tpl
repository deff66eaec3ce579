{{/* The shared store of mgmtd, meta and the backup, etcd or PostgreSQL: what their pods need to use it. */}}

{{/* etcd, postgres, or empty: mgmtd and meta keep their rows on volumes */}}
{{- define "fire-flyer.store" -}}
{{- if .Values.threefs.etcd.endpoints }}etcd{{ else if .Values.threefs.postgres.hosts }}postgres{{ end }}
{{- end }}

{{- define "fire-flyer.store-env" -}}
{{- with include "fire-flyer.store" . }}{{ include (printf "fire-flyer.%s-env" .) $ }}{{ end }}
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

{{- define "fire-flyer.postgres-env" -}}
{{- with .Values.threefs.postgres }}
- name: THREEFS_POSTGRES_URL
  value: {{ printf "postgresql://%s@%s/%s" .user (join "," .hosts) .database | quote }}
- name: THREEFS_POSTGRES_SCHEMA
  value: {{ .schema | quote }}
- name: THREEFS_POSTGRES_REQUIRE_STANDBY
  value: {{ .requireStandby | quote }}
{{- if .tlsSecret }}
- name: THREEFS_POSTGRES_CA_FILE
  value: /etc/threefs-postgres/tls/ca.crt
{{- if .clientCertificate }}
- name: THREEFS_POSTGRES_CERT_FILE
  value: /etc/threefs-postgres/tls/tls.crt
- name: THREEFS_POSTGRES_KEY_FILE
  value: /etc/threefs-postgres/tls/tls.key
{{- end }}
{{- end }}
{{- if .passwordSecret }}
- name: THREEFS_POSTGRES_PASSWORD_FILE
  value: /etc/threefs-postgres/user/password
{{- end }}
{{- end }}
{{- end }}

{{/* Both kinds of store have the same files. */}}
{{- define "fire-flyer.store-mounts" -}}
{{- with include "fire-flyer.store" . }}
{{- $store := index $.Values.threefs . }}
{{- if $store.tlsSecret }}
- {name: {{ . }}-tls, mountPath: /etc/threefs-{{ . }}/tls, readOnly: true}
{{- end }}
{{- if $store.passwordSecret }}
- {name: {{ . }}-user, mountPath: /etc/threefs-{{ . }}/user, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "fire-flyer.store-volumes" -}}
{{- with include "fire-flyer.store" . }}
{{- $store := index $.Values.threefs . }}
{{- if $store.tlsSecret }}
- name: {{ . }}-tls
  secret:
    secretName: {{ $store.tlsSecret }}
    # Readable by the group of the pod only.
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      {{- if $store.clientCertificate }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
{{- end }}
{{- if $store.passwordSecret }}
- name: {{ . }}-user
  secret:
    secretName: {{ $store.passwordSecret }}
    defaultMode: 0440
    items: [{key: password, path: password}]
{{- end }}
{{- end }}
{{- end }}
