{{/* Wrong combinations of the values of the shared store and of its backups. */}}

{{- define "fire-flyer.store-checks" -}}
{{- include "fire-flyer.etcd-checks" . }}
{{- include "fire-flyer.postgres-checks" . }}
{{- $backup := .Values.threefs.backup }}
{{- if and $backup.enabled (not (include "fire-flyer.store" .)) }}
{{- fail "threefs.backup.enabled needs threefs.etcd.endpoints or threefs.postgres.hosts: rows on a volume can be read only inside the pod of their service (kubectl exec threefs-meta-0 -- threefs meta dump --data /data/meta --file /data/meta.dump)" }}
{{- end }}
{{- $class := $backup.volume.storageClass }}
{{- if and $backup.enabled .Values.csi.enabled $class (eq $class .Values.csi.storageClass.name) }}
{{- fail (printf "threefs.backup.volume.storageClass is %s, which stores backups on the 3FS that they are needed to restore: use another one" $class) }}
{{- end }}
{{- end }}

{{- define "fire-flyer.etcd-checks" -}}
{{- with .Values.threefs.etcd }}
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
{{- end }}
{{- end }}

{{- define "fire-flyer.postgres-checks" -}}
{{- with .Values.threefs.postgres }}
{{- if and .hosts $.Values.threefs.etcd.endpoints }}
{{- fail "threefs.etcd.endpoints and threefs.postgres.hosts are both set: the rows are in one store. Keep the one that has them; to change it, convert it first (docs/operations/metadata-backup.md)" }}
{{- end }}
{{- if and (not .hosts) (or .tlsSecret .passwordSecret) }}
{{- fail "threefs.postgres.tlsSecret or passwordSecret is set, but threefs.postgres.hosts is empty: name every server" }}
{{- end }}
{{- if and .hosts (not .passwordSecret) (not .clientCertificate) }}
{{- fail "threefs.postgres has neither passwordSecret nor clientCertificate, with which services authenticate: set passwordSecret to a Secret with the password of the user in `password`" }}
{{- end }}
{{- if and .clientCertificate (not .tlsSecret) }}
{{- fail "threefs.postgres.clientCertificate needs threefs.postgres.tlsSecret with ca.crt, tls.crt and tls.key" }}
{{- end }}
{{- if hasPrefix "pg_" .schema }}
{{- fail (printf "threefs.postgres.schema is %s: PostgreSQL reserves names that start with pg_, use another one" .schema) }}
{{- end }}
{{- end }}
{{- end }}
