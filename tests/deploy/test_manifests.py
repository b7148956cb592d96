"""deploy/: every folder that kustomize builds is what Kubernetes accepts, and says what the service's own files say."""

from __future__ import annotations

import base64
import functools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import wds_async
from tests.deploy.schemas import CUSTOM
from tests.deploy.tools import DEPLOY, kustomized, run, with_component
from wds_async import environment
from wds_async.environment import parse_bytes
from wds_async.service.config import ServiceConfig, load_config

FOLDERS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml") if path.parent.parent.name != "components")
SERVED = [folder for folder in FOLDERS if folder.name == "base" or folder.parent.name == "overlays"]
UID = 10001
PREPARES = "folders"
"""The one container that is root, for the instant that giving away two folders takes."""

WRITERS = ["distributed/indexed", "distributed/jobset", "distributed/ray-map", "distributed/ray-feed"]
"""Folders whose pods map shards."""

manifests = functools.cache(kustomized)


def named(folder: Path) -> str:
    """How a test of ``folder`` is called."""
    return str(folder.relative_to(DEPLOY))


every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=named)
every_service = pytest.mark.parametrize("folder", SERVED, ids=named)


def pods(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kind and the pod template of each manifest that has one."""
    for one in found:
        for template in parts(one, "containers"):
            yield one["kind"], template


def parts(value: Any, field: str) -> Iterator[dict[str, Any]]:
    """The templates anywhere in a manifest whose ``spec`` has ``field``."""
    if isinstance(value, list):
        for one in value:
            yield from parts(one, field)
    if isinstance(value, dict):
        if field in value.get("spec", {}):
            yield value
        for one in value.values():
            yield from parts(one, field)


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one manifest of ``kind``."""
    (one,) = [one for one in found if one["kind"] == kind]
    return one


def configuration(found: list[dict[str, Any]], tmp_path: Path) -> ServiceConfig:
    """What the service would be told."""
    file = tmp_path / "serve.yaml"
    file.write_text(only(found, "ConfigMap")["data"]["serve.yaml"], encoding="utf-8")
    return load_config(file)


def test_there_are_folders_for_every_place() -> None:
    assert {named(folder) for folder in FOLDERS} == {
        "base", "overlays/gke", "overlays/eks", "overlays/aks", "overlays/bare-metal",
        "overlays/gke-autopilot", "monitoring", "training/indexed", "training/trainjob", "training/socket", "offline",
        "distributed/work", "distributed/indexed", "distributed/jobset", "distributed/ray-map",
        "distributed/ray-feed",
    }  # fmt: skip


@every_folder
def test_kubernetes_accepts_it(folder: Path) -> None:
    import jsonschema
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    found = manifests(folder)
    assert found
    for one in found:
        if one["kind"] in CUSTOM:
            jsonschema.validate(one, CUSTOM[one["kind"]])
        else:
            kubernetes_validate.validate(one, version, strict=True)
    for one in found:
        if one["kind"] in CUSTOM:
            around: dict[str, Any] = {"metadata": {"name": "x"}}
            for template in parts(one, "containers"):
                whole = {"apiVersion": "v1", "kind": "PodTemplate", **around, "template": template}
                kubernetes_validate.validate(whole, version, strict=True)
            for template in parts(one, "podFailurePolicy"):
                job = {"apiVersion": "batch/v1", "kind": "Job", **around, "spec": template["spec"]}
                kubernetes_validate.validate(job, version, strict=True)


def test_a_mistake_is_not_accepted() -> None:
    import jsonschema
    import kubernetes_validate

    daemons = only(manifests(DEPLOY / "base"), "DaemonSet")
    wrong = {**daemons, "spec": {**daemons["spec"], "replicas": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
    job = only(manifests(DEPLOY / "training" / "trainjob"), "TrainJob")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "workers": 2}}, CUSTOM["TrainJob"])


@every_folder
def test_pods_are_locked(folder: Path) -> None:
    for _, template in pods(manifests(folder)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        around = spec["securityContext"]
        assert (around["runAsNonRoot"], around["runAsUser"], around["runAsGroup"]) == (True, UID, UID)
        assert around["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            inside = container["securityContext"]
            assert inside["readOnlyRootFilesystem"] is True
            assert inside["allowPrivilegeEscalation"] is False
            assert inside["capabilities"]["drop"] == ["ALL"]
            prepares = container["name"] == PREPARES
            assert inside["capabilities"].get("add", []) == (["CHOWN"] if prepares else [])
            assert ("runAsUser" in inside) == prepares
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in spec["volumes"]}


@every_folder
def test_variables_mean_what_they_are_meant_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {variable.name for variable in environment.VARIABLES}
    for _, template in pods(manifests(folder)):
        for container in template["spec"]["containers"]:
            given = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
            for name, text in given.items():
                if name.startswith("WDS_"):
                    assert name in known
                if name in known:
                    monkeypatch.setenv(name, text)
                    environment.value(name)  # ConfigError where it does not parse


@every_folder
def test_images_are_of_this_version(folder: Path) -> None:
    for _, template in pods(manifests(folder)):
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            place, _, tag = container["image"].rpartition(":")
            assert place in {f"registry.example/wds-async{which}" for which in ("", "-train", "-ray")}
            assert tag == wds_async.__version__


@every_service
def test_the_service_starts_with_its_configuration(folder: Path, tmp_path: Path) -> None:
    found = manifests(folder)
    config = configuration(found, tmp_path)
    pod = only(found, "DaemonSet")["spec"]["template"]["spec"]
    (serve,) = pod["containers"]
    (port,) = serve["ports"]
    assert (config.host, config.port) == ("0.0.0.0", port["containerPort"])
    assert "hostPort" not in port, "only by choice"
    mounts = [mount["mountPath"] for mount in serve["volumeMounts"]]
    told = {"/etc/wds-async", str(Path(config.tokens).parent)}
    assert {config.folder, config.hand_from, str(Path(config.socket).parent), "/tmp"} | told == set(mounts)
    volumes = {mount["mountPath"]: mount for mount in serve["volumeMounts"]}
    assert volumes[config.hand_from] == {**volumes[config.folder], "mountPath": config.hand_from, "readOnly": True}
    assert "readOnly" not in volumes[config.folder]
    (variable,) = [one["value"] for one in serve["env"] if one["name"] == "WDS_SERVE_CONFIG"]
    assert Path(variable).parent.as_posix() in mounts
    assert pod["terminationGracePeriodSeconds"] >= config.drain_s + config.grace_s + 5
    assert parse_bytes(serve["resources"]["limits"]["memory"].removesuffix("i")) >= 4 * config.memory_bytes
    assert not config.urls
    config_map = next(one for one in pod["volumes"] if one["name"] == "config")["configMap"]["name"]
    assert config_map == only(found, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"wds-async-[a-z0-9]{10}", config_map), "without a hash a change would roll nothing"


@every_service
def test_probes_ask_what_there_is(folder: Path) -> None:
    (serve,) = only(manifests(folder), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    asked = {name: serve[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: get["path"] for name, get in asked.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {get["port"] for get in asked.values()} == {serve["ports"][0]["name"]}


@every_service
def test_the_network_is_closed_but_for_what_is_named(folder: Path) -> None:
    found = manifests(folder)
    policy = only(found, "NetworkPolicy")["spec"]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert only(found, "Service")["spec"]["internalTrafficPolicy"] == "Local"
    labels = only(found, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    for selector in (policy["podSelector"]["matchLabels"], only(found, "Service")["spec"]["selector"]):
        assert selector.items() <= labels.items()
    everywhere = [
        block["ipBlock"]
        for rule in policy["egress"]
        for block in rule["to"]
        if block.get("ipBlock", {}).get("cidr") in ("0.0.0.0/0", "::/0")
    ]
    assert len(everywhere) == 2
    shut = {net for block in everywhere for net in block["except"]}
    assert {"169.254.0.0/16", "fe80::/10"} <= shut, "metadata servers"


def test_overlays_differ_in_what_they_are_for(tmp_path: Path) -> None:
    allowed, disks, accounts = {}, {}, {}
    for folder in SERVED:
        found = manifests(folder)
        (allowed[folder.name],) = configuration(found, tmp_path).allow
        volumes = only(found, "DaemonSet")["spec"]["template"]["spec"]["volumes"]
        (disk,) = [one for one in volumes if one["name"] == "cache"]
        disks[folder.name] = disk["hostPath"]["path"] if "hostPath" in disk else "the pod's own/wds-async"
        accounts[folder.name] = set(only(found, "ServiceAccount")["metadata"].get("annotations", {}))
    assert {name: url.split(":")[0] for name, url in allowed.items()} == {
        "base": "s3", "gke": "gs", "gke-autopilot": "gs", "eks": "s3", "aks": "az", "bare-metal": "s3",
    }  # fmt: skip
    assert len(set(disks.values())) == len(disks)
    assert all(path.endswith("/wds-async") for path in disks.values())
    assert "iam.gke.io/gcp-service-account" in accounts["gke"] & accounts["gke-autopilot"]
    assert "eks.amazonaws.com/role-arn" in accounts["eks"]
    assert "azure.workload.identity/client-id" in accounts["aks"]
    assert accounts["bare-metal"] == accounts["base"] == set()


@pytest.mark.parametrize("name", ["indexed", "trainjob", "socket"])
def test_training_finds_its_nodes_service(name: str) -> None:
    ((_, template),) = pods(manifests(DEPLOY / "training" / name))
    (container,) = template["spec"]["containers"]
    env = {one["name"]: one for one in container["env"]}
    if name == "socket":
        assert env["AIS_ENDPOINT"]["value"] == "unix:/run/wds-async/serve.sock"
        assert {"name": "wds-async", "mountPath": "/run/wds-async", "readOnly": True} in container["volumeMounts"]
    else:
        service = only(manifests(DEPLOY / "base"), "Service")["metadata"]
        assert env["AIS_ENDPOINT"]["value"] == f"http://{service['name']}.{service['namespace']}:51080"
    assert env["USE_AIS_FOR"]["value"] == "gs:s3:az"
    assert template["metadata"]["labels"]["wds-async/client"] == "true"
    ranks = {f"rank-{rank}": 9464 + rank for rank in range(8)}
    assert ranks.items() <= {port["name"]: port["containerPort"] for port in container["ports"]}.items()


def secret(found: list[dict[str, Any]], name: str) -> str:
    """The one value of a Secret."""
    (data,) = [one["data"] for one in found if one["kind"] == "Secret" and one["metadata"]["name"] == name]
    (value,) = data.values()
    return base64.b64decode(value).decode()


@pytest.mark.parametrize("name", ["training/indexed", "training/trainjob", "training/socket", "offline", *WRITERS])
def test_clients_show_a_token_that_the_service_knows(name: str) -> None:
    found = manifests(DEPLOY / name)
    (container,) = next(t for _, t in pods(found) if t["spec"]["containers"][0].get("env"))["spec"]["containers"]
    (given,) = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "AIS_AUTHN_TOKEN"]
    token = secret(found, given["name"])
    assert len(token) >= 32
    assert secret(manifests(DEPLOY / "base"), "wds-async-tokens").splitlines() == [token]


def test_tokens_are_drawn_anew_for_each_checkout_and_kept(tmp_path: Path) -> None:
    drawn = []
    for number in range(2):
        copy = tmp_path / str(number)
        shutil.copytree(DEPLOY, copy, ignore=shutil.ignore_patterns("token", "tokens"))
        run(sys.executable, copy / "render.py")
        drawn.append((copy / "base" / "tokens").read_text())
        assert (copy / "base" / "tokens").stat().st_mode & 0o077 == 0
        run(sys.executable, copy / "render.py")
        assert (copy / "base" / "tokens").read_text() == drawn[-1]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("component", "shown"),
    [("host-port", "hostPort: 51080"), ("on-delete", "type: OnDelete"), ("cluster", "clusterIP: None")],
)
def test_components_change_what_they_are_for(component: str, shown: str, tmp_path: Path) -> None:
    text, without = with_component(component, tmp_path)
    assert shown in text
    assert shown not in without


def test_services_of_a_cluster_find_and_reach_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [one for one in yaml.safe_load_all(with_component("cluster", tmp_path)[0]) if one]
    pod = only(found, "DaemonSet")["spec"]["template"]
    (serve,) = pod["spec"]["containers"]
    env = {one["name"]: one for one in serve["env"]}
    assert env["WDS_PEER_ADDRESS"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["WDS_PEER_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    (service,) = [one for one in found if one["metadata"]["name"] == "wds-async-peers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    port = serve["ports"][0]["containerPort"]
    assert env["WDS_PEERS"]["value"] == f"dns:{service['metadata']['name']}:{port}"
    monkeypatch.setenv("WDS_PEERS", env["WDS_PEERS"]["value"])
    monkeypatch.setenv("WDS_PEER_ADDRESS", "10.0.0.7")
    config = load_config(None, folder="")
    assert (config.peers, config.peer_address) == ((env["WDS_PEERS"]["value"],), "10.0.0.7")
    policy = only(found, "NetworkPolicy")["spec"]
    others = {"podSelector": {"matchLabels": service["spec"]["selector"]}}
    assert [rule["ports"] for rule in policy["ingress"] if others in rule["from"]] == [
        [{"port": port, "protocol": "TCP"}]
    ]
    assert [rule["ports"] for rule in policy["egress"] if others in rule["to"]] == [[{"port": port, "protocol": "TCP"}]]


def test_every_taint_is_tolerated_and_cloud_dns_is_reached() -> None:
    """GPU nodes are tainted in each cloud's own way; DNS of GKE may answer at a link-local address."""
    pod = only(manifests(DEPLOY / "base"), "DaemonSet")["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    for name in ("gke", "gke-autopilot"):
        egress = only(manifests(DEPLOY / "overlays" / name), "NetworkPolicy")["spec"]["egress"]
        ports = [
            (port["port"], port["protocol"])
            for rule in egress
            if {"ipBlock": {"cidr": "169.254.169.254/32"}} in rule["to"]
            for port in rule["ports"]
        ]
        assert {(53, "UDP"), (53, "TCP")} <= set(ports)


def test_the_numbers_of_the_training_agree() -> None:
    found = manifests(DEPLOY / "training" / "indexed")
    job = only(found, "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    machines = next(one["value"] for one in container["env"] if one["name"] == "MACHINES")
    budget = only(found, "PodDisruptionBudget")["spec"]
    assert {job["parallelism"], budget["minAvailable"], int(machines)} == {job["completions"]}
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    service = only(found, "Service")
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert f"--rdzv-endpoint=train-0.{service['metadata']['name']}:29500" in container["args"]
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_offline_work_is_divided_by_the_index() -> None:
    job = only(manifests(DEPLOY / "offline"), "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {one["name"]: one for one in container["env"]}
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == path
    assert int(env["WORLD_SIZE"]["value"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    written = container["command"][-1].split(":")[0]
    assert written not in env["USE_AIS_FOR"]["value"].split(":"), "the service serves reading only"


def test_the_operators_trainer_is_the_same_training() -> None:
    job = only(manifests(DEPLOY / "training" / "trainjob"), "TrainJob")
    runtime = only(manifests(DEPLOY / "training" / "trainjob"), "TrainingRuntime")
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].split("/")[0], "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    ((_, template),) = pods([runtime])
    (container,) = template["spec"]["containers"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == container["name"] == "node", "the operator looks for these names"
    assert node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    plain = only(manifests(DEPLOY / "training" / "indexed"), "Job")["spec"]
    (indexed,) = plain["template"]["spec"]["containers"]
    assert job["spec"]["trainer"]["args"] == [word for word in indexed["args"] if not is_of_torchrun(word)]
    assert job["spec"]["trainer"]["numNodes"] == plain["completions"]
    assert job["spec"]["trainer"]["numProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["resources"] == indexed["resources"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


def is_of_torchrun(word: str) -> bool:
    return word.startswith(("--nnodes", "--nproc", "--rdzv", "--max-restarts"))


def test_files_of_config_maps_are_whole_yaml() -> None:
    for folder in SERVED:
        text = only(manifests(folder), "ConfigMap")["data"]["serve.yaml"]
        assert isinstance(yaml.safe_load(text), dict)
        assert text.startswith("#"), "its comments travel with it"
