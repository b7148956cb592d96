"""deploy/helm: the chart makes the objects of the kustomizations, by default and with values of each cloud."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import wds_async
from tests.deploy.schemas import CUSTOM
from tests.deploy.tools import DEPLOY, documents, kustomized, mapping, run, tool, with_component
from wds_async.service.config import ServiceConfig, load_config

CHART = DEPLOY / "helm" / "wds-async"
CLOUDS = sorted((DEPLOY / "helm" / "clouds").glob("*.yaml"))
MONITORS = ("serviceMonitor", "podMonitor", "prometheusRule")
Objects = dict[tuple[str, str], dict[str, Any]]


@functools.cache
def template(*options: str | Path) -> str:
    """Print what ``helm install wds-async`` would send."""
    return run(tool("helm"), "template", "wds-async", CHART, "--namespace", "wds-async", *options)


def refused(*options: str) -> str:
    """Return the error of ``helm template`` with options that it may not accept."""
    command = [tool("helm"), "template", "wds-async", str(CHART), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def comparable(manifests: list[dict[str, Any]]) -> Objects:
    """The objects by kind and name, without what differs between the two on purpose.

    Helm makes the namespace, adds two labels, and has the Secret made by hand. It rolls pods by a checksum in their
    annotations, kustomize by a hash in the name of the ConfigMap. Comments of serve.yaml are lost.
    """
    objects: Objects = {}
    for one in manifests:
        labels = one["metadata"].setdefault("labels", {})
        labels.pop("app.kubernetes.io/managed-by", None)
        labels.pop("helm.sh/chart", None)
        if one["kind"] == "ConfigMap":
            one["metadata"]["name"] = "wds-async"
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        if one["kind"] == "DaemonSet":
            pod = one["spec"]["template"]
            pod["metadata"]["annotations"].pop("checksum/config", None)
            (config,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "config")
            config["configMap"]["name"] = "wds-async"
            pod["spec"].setdefault("initContainers", [])
            # kustomize puts what a patch adds in front.
            for named in (pod["spec"]["volumes"], pod["spec"]["containers"][0]["env"]):
                named.sort(key=lambda entry: entry["name"])
        if one["kind"] not in ("Namespace", "Secret"):
            objects[one["kind"], one["metadata"]["name"]] = one
    return objects


def rendered(*options: str | Path) -> Objects:
    """The objects of the chart."""
    return comparable(documents(template(*options)))


def same(chart: Objects, kustomization: Objects) -> None:
    """Compare object by object, so that a failure shows one of them."""
    assert chart.keys() == kustomization.keys()
    for key, one in chart.items():
        assert one == kustomization[key], key


def test_helm_lint_accepts_the_chart() -> None:
    for values in ([], *(["--values", str(path)] for path in CLOUDS)):
        assert "0 chart(s) failed" in run(tool("helm"), "lint", "--strict", CHART, *values)


def test_defaults_are_the_base() -> None:
    same(rendered(), comparable(kustomized(DEPLOY / "base")))


@pytest.mark.parametrize("values", CLOUDS, ids=lambda path: path.stem)
def test_values_of_a_cloud_are_its_overlay(values: Path) -> None:
    same(rendered("--values", values), comparable(kustomized(DEPLOY / "overlays" / values.stem)))


def test_each_overlay_has_its_values() -> None:
    assert {path.stem for path in CLOUDS} == {path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml")}


@pytest.mark.parametrize(
    ("component", "option"), [("host-port", "hostPort"), ("on-delete", "onDelete"), ("cluster", "cluster")]
)
def test_options_are_the_components(component: str, option: str, tmp_path: Path) -> None:
    chart = rendered("--set", f"{option}=true", "--values", DEPLOY / "helm" / "clouds" / "bare-metal.yaml")
    expected = comparable(documents(with_component(component, tmp_path)[0]))
    if peers := expected.get(("Service", "wds-async-peers")):
        peers["metadata"] = chart["Service", "wds-async-peers"]["metadata"]  # the overlay gives it namespace and labels
    same(chart, expected)


def test_monitoring_is_the_folder() -> None:
    chart = rendered(*(f"--set=monitoring.{name}=true" for name in MONITORS))
    expected = {
        (one["kind"], one["metadata"]["name"]): one
        for one in kustomized(DEPLOY / "monitoring")
        if one["kind"] != "ConfigMap"  # Grafana's dashboard
    }
    same({key: one for key, one in chart.items() if key[0] in CUSTOM}, expected)


def test_kubernetes_accepts_every_option(tmp_path: Path) -> None:
    """Values that no overlay has: the namespace, the image, and lists that are added to."""
    import kubernetes_validate

    values = {
        "image": {"digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "config": {"port": 8080, "drain_s": 0.5, "memory_bytes": 2**28, "tokens": ""},
        "tokenSecret": "",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "podAnnotations": {"team": "vision"},
        "seLinuxOptions": {"level": "s0"},
        "volumes": [{"name": "authority", "configMap": {"name": "authority"}}],
        "volumeMounts": [{"name": "authority", "mountPath": "/etc/authority", "readOnly": True}],
        "priorityClass": {"create": False, "name": "high"},
        "networkPolicy": {"create": False},
        "maxUnavailable": 2,
        "hostPort": True, "cluster": True,
    }  # fmt: skip
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    manifests = documents(run(tool("helm"), "template", "other", CHART, "--namespace", "here", "--values", file))
    for one in manifests:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        assert one["metadata"]["namespace"] == "here"
    objects = comparable(manifests)
    pod = objects["DaemonSet", "wds-async"]["spec"]["template"]["spec"]
    (serve,) = pod["containers"]
    assert {one["image"] for one in (serve, *pod["initContainers"])} == {
        f"registry.example/wds-async@sha256:{'0' * 64}"
    }
    assert serve["ports"] == [{"name": "http", "containerPort": 8080, "hostPort": 8080, "protocol": "TCP"}]
    assert {one["name"]: one.get("value") for one in serve["env"]}["WDS_PEERS"] == "dns:wds-async-peers:8080"
    assert [one["mountPath"] for one in serve["volumeMounts"]][-1] == "/etc/authority"
    assert not {"tokens"} & {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] == 41
    assert not {("NetworkPolicy", "wds-async"), ("PriorityClass", "high")} & objects.keys()
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps(objects["ConfigMap", "wds-async"]["data"]["serve.yaml"]), encoding="utf-8")
    assert load_config(config).memory_bytes == 2**28


def test_a_changed_configuration_rolls_the_pods() -> None:
    def checksum(*options: str) -> str:
        (daemons,) = (one for one in documents(template(*options)) if one["kind"] == "DaemonSet")
        return str(daemons["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "hostPort=true") != checksum("--set", "config.log=human")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("config.cachesize=60%", "cachesize"),
        ("config.allow={bucket}", "/config/allow/0"),
        ("cache.folder=/mnt", "folder"),
        ("hostport=true", "hostport"),
        ("tokenSecret=", "tokenSecret"),
    ],
)
def test_a_mistake_is_refused_by_name(option: str, named: str) -> None:
    assert named in refused("--set", option).replace("allow.0", "/config/allow/0")


def test_the_schema_knows_every_setting_and_the_version_is_ours() -> None:
    """Needs no helm."""
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = mapping(CHART / "values.yaml")
    jsonschema.validate(values, schema)
    assert schema["properties"].keys() - {"global"} == values.keys()
    settings = schema["properties"]["config"]["propertyNames"]["enum"]
    assert settings == [field.name for field in dataclasses.fields(ServiceConfig)]
    assert values["config"] == mapping(DEPLOY / "base" / "serve.yaml")
    chart = mapping(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == wds_async.__version__
