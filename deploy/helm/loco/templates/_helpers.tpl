{{- define "loco.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "loco.labels" -}}
app.kubernetes.io/name: loco
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "loco.coordinator.selector" -}}
app.kubernetes.io/name: loco
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: coordinator
{{- end }}

{{- define "loco.coordinator.name" -}}
{{ printf "%s-coordinator" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* Of a site's pods: nothing of the chart's version, so that its upgrade restarts no site. */}}
{{- define "loco.site.labels" -}}
app.kubernetes.io/name: loco
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: site
loco/site: {{ .site.name }}
{{- end }}

{{/* A Job cannot be changed: one that would differ gets another name, and takes the place of the old
one in an upgrade. dict with `root`, `site` and `name`. */}}
{{- define "loco.site.job" -}}
{{- $pod := include "loco.site.pod" (dict "root" .root "site" .site "subdomain" .name "master" "") }}
{{- $nodes := .site.nodes | default 1 | int }}
{{- $fixed := printf "%s/%d/%s" $pod $nodes (include "loco.failurePolicy" .root) }}
{{- printf "%s-%s" (.name | trunc 42 | trimSuffix "-") ($fixed | sha256sum | trunc 8) }}
{{- end }}

{{/* Of a pod: nothing in loco needs root, privileges or a writable image. */}}
{{- define "loco.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "loco.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Exit codes that no restart cures: 2 config, 3 refused, 5 not finite. torchrun tells 1 only. */}}
{{- define "loco.failurePolicy" -}}
rules:
  - action: FailJob
    onExitCodes: {containerName: worker, operator: In, values: [2, 3, 5]}
{{- end }}

{{/* The pod of one node of a site: dict with `root`, `site`, `subdomain` and `master`. */}}
{{- define "loco.site.pod" -}}
{{- $site := .site }}
{{- $nodes := $site.nodes | default 1 | int }}
{{- $ranks := $site.ranksPerNode | default 1 | int }}
{{- $gpus := $site.gpusPerNode | default 0 | int }}
restartPolicy: Never
automountServiceAccountToken: false
subdomain: {{ .subdomain }}
terminationGracePeriodSeconds: 60
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ include "loco.podSecurity" . | nindent 2 }}
{{- with $site.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $site.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: worker
    image: {{ include "loco.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command:
      {{- if eq $nodes 1 }}
      - loco
      - worker
      - --ranks={{ $ranks }}
      {{- else }}
      - torchrun
      - --nnodes={{ $nodes }}
      - --node-rank=$(JOB_COMPLETION_INDEX)
      - --nproc-per-node={{ $ranks }}
      - --master-addr={{ .master }}
      - --master-port=29500
      - -m
      - worker
      {{- end }}
      - --coordinator={{ $site.coordinator }}
      - --site={{ $site.name }}
      - --device={{ if $gpus }}cuda{{ else }}cpu{{ end }}
      - --bundle=/bundle/bundle.pem
      {{- with $site.data }}
      - --data={{ . }}
      {{- end }}
      {{- if $site.checkpointClaim }}
      - --checkpoint=/checkpoint
      {{- end }}
      {{- range $site.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      - name: LOCO_LOG
        value: json
      {{- with $site.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources:
      {{- $resources := deepCopy ($site.resources | default dict) }}
      {{- if $gpus }}
      {{- $limits := merge (dict "nvidia.com/gpu" $gpus) ($resources.limits | default dict) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    securityContext: {{ include "loco.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: bundle, mountPath: /bundle, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /cache}
      - {name: shm, mountPath: /dev/shm}
      {{- with $site.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- if $site.dataClaim }}
      - {name: data, mountPath: /data, readOnly: true}
      {{- end }}
      {{- if $site.checkpointClaim }}
      - {name: checkpoint, mountPath: /checkpoint}
      {{- end }}
volumes:
  - name: bundle
    secret: {secretName: {{ $site.bundleSecret }}, defaultMode: 0440}
  - name: tmp
    emptyDir: {}
  - name: cache
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory} # NCCL between the GPUs of a node
  {{- with $site.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $site.dataClaim }}
  - name: data
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
  {{- end }}
  {{- with $site.checkpointClaim }}
  - name: checkpoint
    persistentVolumeClaim: {claimName: {{ . }}}
  {{- end }}
{{- end }}
