{{- define "wds-async.selector" -}}
app.kubernetes.io/name: wds-async
app.kubernetes.io/component: service
{{- end }}

{{- define "wds-async.labels" -}}
app.kubernetes.io/name: wds-async
app.kubernetes.io/part-of: wds-async
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "wds-async.monitoringLabels" -}}
app.kubernetes.io/name: wds-async
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "wds-async.image" -}}
{{- with .Values.image -}}
image: {{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- with .pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}
{{- end }}
