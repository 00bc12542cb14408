{{- /* What the components are: their kind, the command, and on which lag they are scaled, if they are. `bound` is what
waits for a receiver: of that, what does not move starts no pod. */ -}}
{{- define "gpustream.components" -}}
topics: {kind: Job, command: [topics, create]}
node: {kind: DaemonSet, command: [produce, node]}
cluster: {kind: Deployment, command: [produce, cluster]}
attribution: {kind: StatefulSet, command: [stream, attribution], topic: gpu.samples, group: gpustream-attribution}
alerts: {kind: StatefulSet, command: [stream, alerts], topic: gpu.attributed, group: gpustream-alerts}
usage: {kind: StatefulSet, command: [stream, usage], topic: gpu.attributed, group: gpustream-usage}
remoteWrite: {kind: StatefulSet, command: [sink, remote-write], topic: gpu.attributed, group: gpustream-sink-remote-write, bound: true}
alertmanager: {kind: StatefulSet, command: [sink, alertmanager]}
webhook: {kind: StatefulSet, command: [sink, webhook], topic: gpu.alerts, group: gpustream-sink-webhook, bound: true}
scrape: {kind: StatefulSet, command: [sink, scrape]}
parquet: {kind: StatefulSet, command: [sink, parquet], topic: gpu.usage, group: gpustream-sink-parquet}
metricsApi: {kind: Deployment, command: [sink, metrics-api]}
{{- end }}

{{- define "gpustream.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* In: [root, component]. Out: the settings of a component over those of all, with its name and what it is. */ -}}
{{- define "gpustream.settings" -}}
{{- $root := index . 0 }}
{{- $key := index . 1 }}
{{- $name := kebabcase $key }}
{{- $settings := dict "name" $name "fullname" (printf "%s-%s" (include "gpustream.fullname" $root) $name) }}
{{- $own := index $root.Values $key }}
{{- range $values := list (get (include "gpustream.components" $root | fromYaml) $key) $root.Values.defaults $own }}
{{- range $setting, $value := $values }}
{{- $_ := set $settings $setting (kindIs "map" $value | ternary (deepCopy $value) $value) }}
{{- end }}
{{- end }}
{{- /* One by one, and not by merge: that takes false and 0 for not set. */ -}}
{{- $autoscaling := deepCopy $root.Values.defaults.autoscaling }}
{{- range $setting, $value := $own.autoscaling }}
{{- $_ := set $autoscaling $setting $value }}
{{- end }}
{{- $_ := set $settings "autoscaling" $autoscaling }}
{{- if $root.Values.openshift }}
{{- if eq $name "node" }}
{{- $_ := set $settings.podSecurityContext "seLinuxOptions" (dict "type" "spc_t") }}
{{- else }}
{{- $_ := set $settings "podSecurityContext" (omit $settings.podSecurityContext "runAsUser" "runAsGroup" "fsGroup") }}
{{- end }}
{{- else if and $root.Values.selinux (eq $name "node") }}
{{- $_ := set $settings.podSecurityContext "seLinuxOptions" (dict "type" "spc_t") }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- /* In: [root, name]. */ -}}
{{- define "gpustream.selector" -}}
app.kubernetes.io/name: gpustream
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* In: [root, name]. */ -}}
{{- define "gpustream.labels" -}}
{{- $root := index . 0 }}
{{- include "gpustream.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "gpustream.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* In: options by name. Out: their environment variables; a list is one value a line. */ -}}
{{- define "gpustream.environment" -}}
{{- range $option, $value := . }}
- name: GPUSTREAM_{{ $option | upper | replace "-" "_" }}
  value: {{ kindIs "slice" $value | ternary (join "\n" (kindIs "slice" $value | ternary $value list)) (kindIs "float64" $value | ternary (printf "%v" $value) (toString $value)) | quote }}
{{- end }}
{{- end }}

{{- define "gpustream.topic-prefix" -}}
{{- index .Values.options "topic-prefix" | default "" -}}
{{- end }}

{{- /* In: [root, settings]. Out: the options by which a component logs in as its KafkaUser. */ -}}
{{- define "gpustream.strimzi-login" -}}
{{- $files := "/etc/gpustream/kafka" }}
{{- if eq (index . 0).Values.strimzi.authentication "tls" }}
kafka-security: ssl
kafka-cert: {{ $files }}/user.crt
kafka-key: {{ $files }}/user.key
{{- else }}
kafka-security: sasl-ssl
kafka-sasl-mechanism: scram-sha-512
kafka-username: {{ (index . 1).fullname }}
kafka-password-file: {{ $files }}/password
{{- end }}
kafka-ca: {{ $files }}/ca.crt
{{- end }}
