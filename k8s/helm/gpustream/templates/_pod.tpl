{{- /* The pod template of every component. In: [root, settings]. */ -}}
{{- define "gpustream.pod" -}}
{{- $root := index . 0 }}
{{- $c := index . 1 }}
{{- $of := printf "/etc/gpustream/%s" $c.name }}
{{- $isNode := eq $c.name "node" }}
{{- $isCluster := eq $c.name "cluster" }}
{{- $isJob := eq $c.kind "Job" }}
{{- $isApi := eq $c.name "metrics-api" }}
{{- $secret := $c.secret }}
{{- $rules := eq $c.name "alerts" | ternary $c.rules "" }}
{{- $login := and $root.Values.strimzi.users (ne $root.Values.strimzi.authentication "tls-external") }}
{{- $options := include "gpustream.options" (list $root $c) | fromYaml }}
metadata:
  labels:
    {{- include "gpustream.selector" (list $root $c.name) | nindent 4 }}
    {{- with $c.podLabels }}
    {{- include "gpustream.site-labels" (list (printf "podLabels of %s" $c.name) .) }}
    {{- include "gpustream.texts" . | trim | nindent 4 }}
    {{- end }}
  {{- if or $c.podAnnotations $rules }}
  annotations:
    {{- with $c.podAnnotations }}
    {{- include "gpustream.texts" . | trim | nindent 4 }}
    {{- end }}
    {{- with $rules }}
    checksum/rules: {{ sha256sum . | quote }} # it reads them at its start only
    {{- end }}
  {{- end }}
spec:
  {{- if $isJob }}
  restartPolicy: OnFailure
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $isCluster (eq $c.name "reclaim") (and $isApi $c.aggregated) }}
  serviceAccountName: {{ $c.fullname }}
  {{- else }}
  {{- with and $isNode $root.Values.openshift | ternary $c.fullname $c.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $c.terminationGracePeriodSeconds }}
  {{- if $isNode }}
  hostPID: true # NVML gives the PIDs of the host; their control groups say which pod each is of
  {{- end }}
  {{- with $c.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $c.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $c.nodeSelector }}
  nodeSelector:
    {{- include "gpustream.texts" . | trim | nindent 4 }}
  {{- end }}
  {{- with $c.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.extraPodSpec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if not (or $isJob $isNode (hasKey ($c.extraPodSpec | default dict) "topologySpreadConstraints")) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "gpustream.selector" (list $root $c.name) | nindent 10 }}
  {{- end }}
  securityContext:
    {{- toYaml $c.podSecurityContext | nindent 4 }}
  containers:
    - name: {{ $c.name }}
      image: {{ include "gpustream.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- toYaml (concat $c.command ($c.extraArgs | default list)) | nindent 8 }}
      env:
        {{- $names := list }}
        {{- range $c.extraEnv }}
        {{- $names = append $names .name }}
        {{- end }}
        {{- range include "gpustream.environment" (list $c $options) | fromYamlArray }}
        {{- if not (has .name $names) }}
        {{- toYaml (list .) | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with $c.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $c.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if not $isJob }}
      ports:
        - {name: metrics, containerPort: {{ include "gpustream.port" (list $c "listen" $options) }}}
        {{- if eq $c.name "scrape" }}
        - {name: gpus, containerPort: {{ include "gpustream.port" (list $c "scrape-listen" $options) }}}
        {{- else if eq $c.name "page" }}
        - {name: page, containerPort: {{ include "gpustream.port" (list $c "page-listen" $options) }}}
        {{- else if $isApi }}
        - {name: api, containerPort: {{ include "gpustream.port" (list $c "metrics-listen" $options) }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 30
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- end }}
      resources:
        {{- toYaml $c.resources | nindent 8 }}
      securityContext:
        {{- toYaml $c.securityContext | nindent 8 }}
      volumeMounts:
        {{- if $isNode }}
        - {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
        - {name: pods-api, mountPath: /var/lib/kubelet/pods-api, readOnly: true}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
        {{- if or $login $root.Values.kafkaSecret }}
        - {name: kafka, mountPath: /etc/gpustream/kafka, readOnly: true}
        {{- end }}
        {{- if eq $c.name "parquet" }}
        - {name: files, mountPath: /var/lib/gpustream}
        {{- end }}
        {{- if or $secret $isApi }}
        - {name: credentials, mountPath: {{ $of }}, readOnly: true}
        {{- end }}
        {{- if $rules }}
        - {name: rules, mountPath: /etc/gpustream/alert-rules, readOnly: true}
        {{- end }}
        {{- with $c.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if $isNode }}
    - name: pod-resources # the folder: a mount of the socket would keep the dead one when the kubelet restarts
      hostPath: {path: {{ $c.kubeletDirectory }}/pod-resources, type: Directory}
    - name: pods-api # a kubelet before 1.37 has none, and finds this one after its upgrade
      hostPath: {path: {{ $c.kubeletDirectory }}/pods-api, type: DirectoryOrCreate}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 16Mi}
    {{- if $login }}
    - name: kafka
      projected:
        defaultMode: 0440
        sources:
          - secret:
              name: {{ $c.fullname }}
              items:
                {{- range eq $root.Values.strimzi.authentication "tls" | ternary (list "user.crt" "user.key") (list "password") }}
                - {key: {{ . }}, path: {{ . }}}
                {{- end }}
          - secret:
              {{- if $root.Values.kafkaSecret }}
              name: {{ $root.Values.kafkaSecret | quote }}
              {{- else }}
              name: {{ $root.Values.strimzi.cluster }}-cluster-ca-cert
              items:
                - {key: ca.crt, path: ca.crt}
              {{- end }}
    {{- else if $root.Values.kafkaSecret }}
    - name: kafka
      secret: {secretName: {{ $root.Values.kafkaSecret | quote }}, defaultMode: 0440}
    {{- end }}
    {{- if $isApi }}
    - name: credentials
      projected:
        defaultMode: 0440
        sources:
          - secret: {name: {{ $c.tlsSecret | default (printf "%s-tls" $c.fullname) | quote }}}
          {{- with $secret }}
          - secret: {name: {{ . | quote }}}
          {{- end }}
    {{- else if $secret }}
    - name: credentials
      secret: {secretName: {{ $secret | quote }}, defaultMode: 0440}
    {{- end }}
    {{- if $rules }}
    - name: rules
      configMap: {name: {{ $c.fullname }}-rules}
    {{- end }}
    {{- with $c.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
