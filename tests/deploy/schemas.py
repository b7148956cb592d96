"""Schemas of the custom resources that deploy/ uses: no more than it uses, and nothing beside that.

They are written after the operators' documents, because their definitions are not part of Kubernetes and cannot be
fetched by a test. A field that is new in deploy/ fails here first and is then looked up and added.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CUSTOM"]

TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": TEXT}


def _exactly(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _exactly(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_exactly(("name",), name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS),
        spec=spec,
    )


_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_ENDPOINT = _exactly(
    ("port",),
    port=TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    relabelings=_list(_exactly((), sourceLabels=_list(TEXT), targetLabel=TEXT)),
)
_SELECTOR = _exactly(("matchLabels",), matchLabels=LABELS)
_RULE = _exactly(
    ("alert", "expr", "labels", "annotations"), alert=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS,
    **{"for": _DURATION},
)  # fmt: skip
_REPLICAS = _exactly(
    ("replicas", "template"),
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template={"type": "object"},  # held against Kubernetes' own PodTemplate
)
MONITORING = "monitoring.coreos.com/v1"
CUSTOM: dict[str, dict[str, Any]] = {
    "ServiceMonitor": _resource(
        MONITORING,
        "ServiceMonitor",
        _exactly(("selector", "endpoints"), selector=_SELECTOR, endpoints=_list(_ENDPOINT)),
    ),
    "PodMonitor": _resource(
        MONITORING,
        "PodMonitor",
        _exactly(
            ("selector", "podMetricsEndpoints"),
            selector=_SELECTOR,
            namespaceSelector=_exactly((), any={"type": "boolean"}),
            podMetricsEndpoints=_list(_ENDPOINT),
        ),
    ),
    "PrometheusRule": _resource(
        MONITORING,
        "PrometheusRule",
        _exactly(("groups",), groups=_list(_exactly(("name", "rules"), name=TEXT, rules=_list(_RULE)))),
    ),
    "PyTorchJob": _resource(
        "kubeflow.org/v1",
        "PyTorchJob",
        _exactly(
            ("pytorchReplicaSpecs",),
            nprocPerNode=TEXT,
            elasticPolicy=_exactly(
                (),
                rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
                minReplicas={"type": "integer"},
                maxReplicas={"type": "integer"},
                maxRestarts={"type": "integer"},
            ),
            runPolicy=_exactly((), cleanPodPolicy={"enum": ["All", "Running", "None"]}),
            pytorchReplicaSpecs=_exactly(("Worker",), Master=_REPLICAS, Worker=_REPLICAS),
        ),
    ),
}
"""By kind."""
