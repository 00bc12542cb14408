// Names the definitions of the custom resources that k8s/ has objects of. Nothing is built of these modules.
module gpustream.invalid/tests/real/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	github.com/kedacore/keda/v2 v2.21.0
	github.com/prometheus-operator/prometheus-operator v0.85.0
)
