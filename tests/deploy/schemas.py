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
_WHOLE = {"type": "object"}
"""A pod or a Job, which is held against Kubernetes' own schema."""
_NUMBER = {"type": "integer", "minimum": 0}
_JOBS = _list(
    _exactly(
        ("name", "template"),
        name=TEXT,
        replicas={"const": 1},
        template=_WHOLE,
        dependsOn=_list(_exactly(("name", "status"), name=TEXT, status={"enum": ["Ready", "Complete"]})),
    )
)
_WORKERS = _exactly(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=_NUMBER,
    minReplicas=_NUMBER,
    maxReplicas=_NUMBER,
    rayStartParams=LABELS,
    template=_WHOLE,
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
    "JobSet": _resource(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        _exactly(
            ("replicatedJobs",),
            ttlSecondsAfterFinished=_NUMBER,
            failurePolicy=_exactly((), maxRestarts=_NUMBER),
            replicatedJobs=_JOBS,
        ),
    ),
    "TrainJob": _resource(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        _exactly(
            ("runtimeRef",),
            runtimeRef=_exactly(
                ("name",), apiGroup=TEXT, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}, name=TEXT
            ),
            trainer=_exactly((), numNodes=_NUMBER, numProcPerNode=_NUMBER, args=_list(TEXT)),
        ),
    ),
    "TrainingRuntime": _resource(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        _exactly(
            ("template",),
            mlPolicy=_exactly((), numNodes=_NUMBER, torch=_exactly()),
            template=_exactly(("spec",), spec=_exactly(("replicatedJobs",), replicatedJobs=_JOBS)),
        ),
    ),
    "RayJob": _resource(
        "ray.io/v1",
        "RayJob",
        _exactly(
            ("entrypoint", "rayClusterSpec"),
            entrypoint=TEXT,
            backoffLimit=_NUMBER,
            shutdownAfterJobFinishes={"const": True},  # Kueue admits no other
            ttlSecondsAfterFinished=_NUMBER,
            submitterPodTemplate=_WHOLE,
            rayClusterSpec=_exactly(
                ("rayVersion", "headGroupSpec"),
                rayVersion=TEXT,
                authOptions=_exactly(("mode",), mode={"enum": ["token", "disabled"]}),
                headGroupSpec=_exactly(("template",), rayStartParams=LABELS, template=_WHOLE),
                workerGroupSpecs=_list(_WORKERS),
            ),
        ),
    ),
}
"""By kind."""
