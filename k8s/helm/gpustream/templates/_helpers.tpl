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
page: {kind: Deployment, command: [sink, page]}
reclaim: {kind: StatefulSet, command: [sink, reclaim]}
{{- end }}

{{- /* 38: the pods of a StatefulSet have a label with its name and 11 characters more, of 63. A release may have a dot in
its name, and a Service may not. */ -}}
{{- define "gpustream.fullname" -}}
{{- $ofRelease := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) }}
{{- .Values.fullnameOverride | default $ofRelease | replace "." "-" | trunc 38 | trimSuffix "-" }}
{{- end }}

{{- /* In: values. Out: the same, without what is null, at any depth: Helm takes away a value of values.yaml that another
file sets to null, and leaves the null in place of one that only the site's own files have. */ -}}
{{- define "gpustream.without-null" -}}
{{- $kept := dict }}
{{- range $name, $value := . }}
{{- if kindIs "map" $value }}
{{- $value = include "gpustream.without-null" $value | fromJson }}
{{- end }}
{{- if not (kindIs "invalid" $value) }}
{{- $_ := set $kept $name $value }}
{{- end }}
{{- end }}
{{- toJson $kept }}
{{- end }}

{{- /* In: [root, component]. Out: the settings of a component over those of all, with its name and what it is. */ -}}
{{- define "gpustream.settings" -}}
{{- $root := index . 0 }}
{{- $key := index . 1 }}
{{- $name := kebabcase $key }}
{{- $settings := dict "name" $name "fullname" (printf "%s-%s" (include "gpustream.fullname" $root) $name) }}
{{- $own := include "gpustream.without-null" (index $root.Values $key) | fromJson }}
{{- $of_all := include "gpustream.without-null" $root.Values.defaults | fromJson }}
{{- range $values := list (get (include "gpustream.components" $root | fromYaml) $key) $of_all $own }}
{{- range $setting, $value := $values }}
{{- $_ := set $settings $setting $value }}
{{- end }}
{{- end }}
{{- /* One by one, and not by merge: that takes false and 0 for not set. */ -}}
{{- $autoscaling := $of_all.autoscaling }}
{{- range $setting, $value := $own.autoscaling }}
{{- $_ := set $autoscaling $setting $value }}
{{- end }}
{{- $_ := set $settings "autoscaling" $autoscaling }}
{{- $context := $settings.podSecurityContext | default dict }}
{{- if and (eq $name "node") (or $root.Values.openshift $root.Values.selinux) }}
{{- $_ := set $settings "podSecurityContext" (set $context "seLinuxOptions" (dict "type" "spc_t")) }}
{{- else if $root.Values.openshift }}
{{- $_ := set $settings "podSecurityContext" (omit $context "runAsUser" "runAsGroup" "fsGroup") }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- /* In: [root, name]. */ -}}
{{- define "gpustream.selector" -}}
app.kubernetes.io/name: gpustream
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* In: labels or annotations. Out: the same, and each value is a text: Helm takes true and 1 for something else, and
the API server refuses that. */ -}}
{{- define "gpustream.texts" -}}
{{- range $name, $value := include "gpustream.without-null" . | fromJson }}
{{ $name | quote }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- /* In: [root, name]. A version may have a +, as Flux adds a commit with it, and a label may not. */ -}}
{{- define "gpustream.labels" -}}
{{- $root := index . 0 }}
{{- include "gpustream.selector" . }}
{{- $labels := dict "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $_ := set $labels "app.kubernetes.io/version" ($root.Chart.AppVersion | replace "+" "_") }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
{{- include "gpustream.site-labels" (list "commonLabels" $root.Values.commonLabels) }}
{{- range $name, $value := $root.Values.commonLabels }}
{{- $_ := set $labels $name $value }}
{{- end }}
{{- include "gpustream.texts" $labels }}
{{- end }}

{{- /* In: [root, a component or nothing, the object's name, its namespace or nothing, its own labels and annotations]. Out:
the metadata of an object. Its own win, one by one: of a hook they say what it is. */ -}}
{{- define "gpustream.metadata" -}}
{{- $root := index . 0 }}
{{- $own := len . | eq 5 | ternary (last .) dict }}
{{- $labels := include "gpustream.labels" (list $root (index . 1)) | fromYaml }}
{{- range $name, $value := $own.labels }}
{{- $_ := set $labels $name $value }}
{{- end }}
{{- $annotations := dict }}
{{- range $some := list $root.Values.commonAnnotations $own.annotations }}
{{- range $name, $value := $some }}
{{- $_ := set $annotations $name $value }}
{{- end }}
{{- end }}
name: {{ index . 2 | quote }}
{{- with index . 3 }}
namespace: {{ . | quote }}
{{- end }}
labels:
  {{- include "gpustream.texts" $labels | trim | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- include "gpustream.texts" . | trim | nindent 2 }}
{{- end }}
{{- end }}

{{- /* In: [root, settings]. Out: the component's own account. */ -}}
{{- define "gpustream.account" -}}
{{- $root := index . 0 }}
{{- $c := index . 1 }}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- $own := dict "annotations" $c.serviceAccount.annotations }}
  {{- include "gpustream.metadata" (list $root $c.name $c.fullname $root.Release.Namespace $own) | nindent 2 }}
{{- end }}

{{- /* In: [the name of a value, its labels]. Out: nothing. It fails if one of them is a label by which things are found. */ -}}
{{- define "gpustream.site-labels" -}}
{{- range $name, $_ := index . 1 }}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "strimzi.io/cluster") }}
{{- fail (printf "%s: %s is set by the chart, because the component or its Kafka is found by it" (index $ 0) $name) }}
{{- end }}
{{- end }}
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

{{- /* In: [settings, options by name]. Out: the container's environment variables. Of a list, each value is a line if the
option can be repeated; else commas are between them. A number is written as JSON has it: Go writes 2e+06. */ -}}
{{- define "gpustream.environment" -}}
{{- $c := index . 0 }}
{{- $options := index . 1 }}
{{- range $option, $value := $options }}
{{- if kindIs "slice" $value }}
{{- $value = join (has $option (list "external-label" "header" "relabel" "url") | ternary "\n" ",") $value }}
{{- else if not (kindIs "string" $value) }}
{{- $value = toJson $value }}
{{- end }}
- name: GPUSTREAM_{{ $option | upper | replace "-" "_" }}
  value: {{ $value | quote }}
{{- end }}
{{- if eq $c.name "node" }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: NVIDIA_VISIBLE_DEVICES # to NVIDIA's container runtime: every GPU; they stay free for others
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: utility
{{- else if eq $c.name "cluster" }}
- name: POD_NAME # who holds the Lease
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- else if eq $c.kind "StatefulSet" }}
{{- if not (hasKey $options "instance-id") }}
- name: GPUSTREAM_INSTANCE_ID # a process that is killed has its partitions at once when it is back
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- if not (hasKey $options "leave-on-stop") }}
- name: GPUSTREAM_LEAVE_ON_STOP # a pod that is stopped hands them over
  value: "true"
{{- end }}
{{- end }}
{{- end }}

{{- /* In: [root, settings]. Out: the options of a component: what the chart knows, the site's for all, the site's for it. */ -}}
{{- define "gpustream.options" -}}
{{- $root := index . 0 }}
{{- $c := index . 1 }}
{{- $files := printf "/etc/gpustream/%s" $c.name }}
{{- $known := dict }}
{{- if and $root.Values.strimzi.users (ne $root.Values.strimzi.authentication "tls-external") }}
{{- $known = include "gpustream.strimzi-login" . | fromYaml }}
{{- end }}
{{- if eq $c.name "cluster" }}
{{- $_ := set $known "lease" (printf "%s/%s" $root.Release.Namespace $c.fullname) }}
{{- if $c.policyEvents }}
{{- $_ := set $known "policy-events" true }}
{{- end }}
{{- else if eq $c.name "scrape" }}
{{- $_ := set $known "scrape-listen" "0.0.0.0:9400" }}
{{- else if eq $c.name "page" }}
{{- $_ := set $known "page-listen" "0.0.0.0:9402" }}
{{- else if eq $c.name "parquet" }}
{{- $_ := set $known "path" "/var/lib/gpustream/usage" }}
{{- else if and (eq $c.name "reclaim") $c.act }}
{{- $_ := set $known "act" true }}
{{- else if and (eq $c.name "alerts") $c.rules }}
{{- $_ := set $known "rules" "/etc/gpustream/alert-rules/rules.toml" }}
{{- else if eq $c.name "metrics-api" }}
{{- $_ := set $known "metrics-listen" "0.0.0.0:8443" }}
{{- $_ := set $known "serving-cert" (printf "%s/tls.crt" $files) }}
{{- $_ := set $known "serving-key" (printf "%s/tls.key" $files) }}
{{- if $c.secret }}
{{- $_ := set $known "client-token-file" (printf "%s/token" $files) }}
{{- end }}
{{- if $c.aggregated }}
{{- $_ := set $known "custom-metrics" (printf "%s/%s" $root.Release.Namespace $c.fullname) }}
{{- end }}
{{- end }}
{{- /* One by one, as above. */ -}}
{{- $options := dict }}
{{- $of_all := include "gpustream.without-null" $root.Values.options | fromJson }}
{{- range $some := list $known (eq $c.kind "Job" | ternary (omit $of_all "listen" "cluster") $of_all) ($c.options | default dict) }}
{{- range $option, $value := $some }}
{{- $_ := set $options $option $value }}
{{- end }}
{{- end }}
{{- toYaml $options }}
{{- end }}

{{- /* In: [root, the name of a value, a folder of files/]. Out: nothing. It fails if the copy of the chart lacks the folder. */ -}}
{{- define "gpustream.linked-files" -}}
{{- if not ((index . 0).Files.Glob (printf "files/%s/*" (index . 2))) }}
{{- fail (printf "%s: this copy of the chart has no files/%s, a link that leads out of its folder: take the chart that `helm package` makes" (index . 1) (index . 2)) }}
{{- end }}
{{- end }}

{{- /* In: [settings, option, options]. Out: the port where it listens, which the kubelet must reach. */ -}}
{{- define "gpustream.port" -}}
{{- $listen := get (index . 2) (index . 1) | toString }}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\]):[0-9]+$" $listen) }}
{{- fail (printf "%s: the option %s must be 0.0.0.0:PORT or [::]:PORT, and is %s: the kubelet and Prometheus ask from outside the pod" (index . 0).name (index . 1) $listen) }}
{{- end }}
{{- regexFind "[0-9]+$" $listen }}
{{- end }}

{{- /* In: [root, settings]: the prefix of a component's topics and group. [root, {}]: that of all. */ -}}
{{- define "gpustream.topic-prefix" -}}
{{- $own := (index . 1).options | default dict }}
{{- hasKey $own "topic-prefix" | ternary (get $own "topic-prefix") (index (index . 0).Values.options "topic-prefix" | default "") -}}
{{- end }}

{{- /* In: [root, settings, the group of its command]. Out: the group that the component reads in. */ -}}
{{- define "gpustream.group" -}}
{{- $group := (index . 1).options.group | default (index . 2) }}
{{- include "gpustream.topic-prefix" . }}{{ kindIs "string" $group | ternary $group (toJson $group) }}
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

{{- /* The user by which KEDA logs in to a Kafka by Strimzi; nothing if the site has a TriggerAuthentication of its own. */ -}}
{{- define "gpustream.keda-login" -}}
{{- if and .Values.keda.enabled .Values.strimzi.users (eq .Values.strimzi.authentication "tls") (not .Values.keda.authentication) -}}
{{ include "gpustream.fullname" . }}-keda
{{- end }}
{{- end }}
