"""Kubernetes files, against KubeRay's published schemas and Kubernetes' own."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.job_submission import JobSubmissionClient
from servers import RayHead, wait_until

from jobs.summarize_corpus import SummarizeCorpus

HERE = Path(__file__).parent
KUBERAY = HERE.parents[1] / "infra" / "kuberay"
FILES = sorted(KUBERAY.glob("*.yaml"))
JOBS = [path for path in FILES if path.name != "network-policy.yaml"]
# Anywhere in the project, whatever it is called: a new one is held to the same.
MANIFESTS = sorted(path for end in ("yaml", "yml") for path in KUBERAY.parent.rglob(f"*.{end}"))
KUBERNETES = "1.34"
SCHEMAS = json.loads((HERE / "kuberay-1.7.json").read_text())


def read(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def of_kind(path: Path, *kinds: str) -> dict[str, Any]:
    (found,) = [document for document in read(path) if document["kind"] in kinds]
    return found


def clusters(value: Any) -> Iterator[dict[str, Any]]:
    """Specs of Ray clusters anywhere in an object."""
    if isinstance(value, dict):
        if "headGroupSpec" in value:
            yield value
        for part in value.values():
            yield from clusters(part)
    elif isinstance(value, list):
        for part in value:
            yield from clusters(part)


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Pod templates anywhere in an object."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


def policies() -> list[dict[str, Any]]:
    documents = read(KUBERAY / "network-policy.yaml")
    assert {document["kind"] for document in documents} == {"NetworkPolicy"}
    return [document["spec"] for document in documents]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """What Kubernetes makes of a pod selector; `In` is the one operator in use."""
    wanted = selector.get("matchExpressions", [])
    assert all(part["operator"] == "In" for part in wanted)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(part["key"]) in part["values"] for part in wanted
    )


def may_talk(a: dict[str, str], b: dict[str, str], port: int) -> bool:
    """Whether the policies let pod `a` of these labels reach a port of pod `b` in the same namespace."""
    return _admits(a, b, port, "Egress", "egress", "to") and _admits(b, a, port, "Ingress", "ingress", "from")


def _admits(own: dict[str, str], other: dict[str, str], port: int, kind: str, rules: str, peers: str) -> bool:
    mine = [policy for policy in policies() if kind in policy["policyTypes"] and selects(policy["podSelector"], own)]
    if not mine:
        return True  # a pod that no policy names is open
    for rule in (rule for policy in mine for rule in policy.get(rules, [])):
        ports = {entry["port"] for entry in rule.get("ports", [])}
        pods = [
            peer["podSelector"]
            for peer in rule.get(peers, [])
            if "podSelector" in peer and "namespaceSelector" not in peer
        ]
        named = peers not in rule or any(selects(selector, other) for selector in pods)
        if named and (not ports or port in ports):
            return True
    return False


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError, kubernetes_validate.ValidationError."""
    if document["apiVersion"] == "ray.io/v1":
        schema = {**SCHEMAS, "$ref": f"#/definitions/{document['kind']}"}
        jsonschema.Draft7Validator(schema).validate(document["spec"])
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_object_is_valid_under_its_published_schema(path: Path) -> None:
    documents = read(path)
    assert documents
    for document in documents:
        check(document)
        assert document["metadata"]["name"]
    for pod in pods(documents):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **pod}, KUBERNETES, strict=True
        )


def test_the_check_refuses_what_a_cluster_would_drop_or_reject() -> None:
    job = of_kind(KUBERAY / "rayjob.yaml", "RayJob")
    for wrong in ({"entryPoint": "x"}, {"backoffLimit": "3"}):
        with pytest.raises(jsonschema.ValidationError):
            check({**job, "spec": {**job["spec"], **wrong}})
    nightly = of_kind(KUBERAY / "raycronjob.yaml", "RayCronJob")
    with pytest.raises(jsonschema.ValidationError):
        # The day this is accepted, raycronjob.yaml should use it.
        check({**nightly, "spec": {**nightly["spec"], "concurrencyPolicy": "Forbid"}})
    cron = of_kind(KUBERAY / "cronjob.yaml", "CronJob")
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**cron, "spec": {**cron["spec"], "concurencyPolicy": "Forbid"}})


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_jobs_settings_are_options_that_the_job_has(path: Path) -> None:
    settings = yaml.safe_load(of_kind(path, "ConfigMap")["data"]["job.yaml"])
    config = SummarizeCorpus(**settings)
    workers = [group for document in read(path) for spec in clusters(document) for group in spec["workerGroupSpecs"]]
    # A job that asks for more at once than the cluster starts with is refused.
    assert config.gpus_per_replica is not None
    assert config.min_replicas is not None
    assert config.min_replicas * config.gpus_per_replica <= sum(group["minReplicas"] for group in workers)
    assert config.replicas == sum(group["maxReplicas"] for group in workers)


def harden(container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not {"privileged", "runAsUser", "runAsNonRoot", "seccompProfile"} & context.keys()  # the pod's hold


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_pod_has_the_least_rights_it_can_work_with(path: Path) -> None:
    documents = read(path)
    found = list(pods(documents))
    assert found or path not in JOBS
    for pod in found:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            harden(container)
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            assert container["image"] == "REGISTRY/skipdecode:0.1.0"
            # Where the root can't be written to, these must be.
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
            kubernetes = {volume["name"] for volume in spec.get("volumes", []) if "projected" in volume}
            assert not kubernetes & {mount["name"] for mount in container["volumeMounts"]}
    assert list(clusters(documents)) or path not in JOBS
    for document in documents:
        # What KubeRay would else add by itself, without any of this: the autoscaler, and the pod that submits.
        for cluster in clusters(document):
            harden(cluster["autoscalerOptions"])
            volumes = {volume["name"] for volume in cluster["headGroupSpec"]["template"]["spec"]["volumes"]}
            assert {mount["name"] for mount in cluster["autoscalerOptions"]["volumeMounts"]} <= volumes
        if document.get("kind") in ("RayJob", "RayCronJob"):
            spec = document["spec"].get("jobTemplate", document["spec"])
            assert spec["submitterPodTemplate"]["spec"]["containers"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_cluster_asks_for_its_token(path: Path) -> None:
    found, containing = list(clusters(read(path))), list(pods(read(path)))
    assert (found and containing) or path not in JOBS
    for cluster in found:
        assert cluster["authOptions"] == {"mode": "token"}
    for pod in containing:
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                # Never a secret's value, only its name.
                assert "TOKEN" not in variable["name"] or "secretKeyRef" in variable["valueFrom"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_network_refuses_all_that_a_job_does_not_need(path: Path) -> None:
    roles = {}
    for pod in pods(read(path)):
        labels = pod["metadata"]["labels"]
        roles[labels["app.kubernetes.io/component"]] = labels
        for kind, rules in (("Egress", "egress"), ("Ingress", "ingress")):
            # Named by a policy, it is closed but for what policies allow.
            named = [p for p in policies() if kind in p["policyTypes"] and selects(p["podSelector"], labels)]
            assert any(not policy.get(rules) for policy in named)
    head, worker, submitter = roles["head"], roles["worker"], roles["submitter"]
    stranger = {"app": "other"}
    for one in (head, worker):
        for other in (head, worker):
            assert may_talk(one, other, 6379)
            assert may_talk(one, other, 31234)
        assert not may_talk(one, submitter, 8080)
        assert not any(may_talk(stranger, one, port) for port in (6379, 8265, 10001, 8080))
    assert may_talk(submitter, head, 8265)
    assert not may_talk(submitter, head, 6379)
    assert not may_talk(submitter, worker, 8265)


def test_nothing_outside_is_reached_but_names_storage_credentials_and_kubernetes() -> None:
    outside = [
        rule for policy in policies() for rule in policy.get("egress", []) if "podSelector" not in rule_peer(rule)
    ]
    assert {entry["port"] for rule in outside for entry in rule["ports"]} == {53, 443, 80, 6443}
    (credentials,) = [rule for rule in outside if {"port": 80} in rule["ports"]]
    assert all(peer["ipBlock"]["cidr"].endswith("/32") for peer in credentials["to"])


def rule_peer(rule: dict[str, Any]) -> dict[str, Any]:
    """The one peer of a rule within the namespace; {} if there is none."""
    return next((peer for peer in rule.get("to", []) if "namespaceSelector" not in peer and "podSelector" in peer), {})


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_head_has_what_the_command_names(path: Path) -> None:
    head = next(clusters(read(path)))["headGroupSpec"]["template"]["spec"]
    assert any("/etc/skipdecode/job.yaml".startswith(m["mountPath"]) for m in head["containers"][0]["volumeMounts"])
    assert "--config /etc/skipdecode/job.yaml" in path.read_text() or "- /etc/skipdecode/job.yaml" in path.read_text()


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_gpu_workers_are_on_spot_scale_and_have_time_to_go(path: Path) -> None:
    found = list(clusters(read(path)))
    assert found
    for cluster in found:
        assert cluster["enableInTreeAutoscaling"]
        (group,) = cluster["workerGroupSpecs"]
        spec = group["template"]["spec"]
        assert group["minReplicas"] < group["maxReplicas"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
        (worker,) = spec["containers"]
        works_on, stops = map(int, re.findall(r"\d+", worker["lifecycle"]["preStop"]["exec"]["command"][-1]))
        assert spec["terminationGracePeriodSeconds"] > works_on + stops
        assert "tolerations" not in cluster["headGroupSpec"]["template"]["spec"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_that_is_stopped_has_longer_than_it_waits_for_units_in_flight(path: Path) -> None:
    grace = yaml.safe_load(of_kind(path, "ConfigMap")["data"]["job.yaml"])["stop_grace_s"]
    text = path.read_text()
    _, after = text.split("RAY_JOB_STOP_WAIT_TIME_S", 1)
    assert int(after.split('"')[1 if after.startswith(":") else 2]) > grace


def test_schedules_leave_no_two_runs_at_once() -> None:
    nightly = of_kind(KUBERAY / "raycronjob.yaml", "RayCronJob")["spec"]
    assert nightly["jobTemplate"]["activeDeadlineSeconds"] < 24 * 3600
    # Another run than that one, with settings of its own: either may be applied beside the other.
    once = json.dumps(of_kind(KUBERAY / "rayjob.yaml", "RayJob")["spec"])
    assert nightly["jobTemplate"] == json.loads(once.replace("skipdecode-job", "skipdecode-nightly-job"))
    cron = of_kind(KUBERAY / "cronjob.yaml", "CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_each_file_names_the_values_to_change(path: Path) -> None:
    comment = path.read_text().split("apiVersion")[0]
    for value in ("REGISTRY/skipdecode:0.1.0", "INPUT-BUCKET", "OUTPUT-BUCKET", "OWNER/MODEL", "nodeSelector"):
        assert value in comment


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_submitter_follows_its_job_to_the_end_and_stops_it_when_it_is_told_to_go() -> None:
    pod = of_kind(KUBERAY / "cronjob.yaml", "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    shell, flag, script = pod["containers"][0]["args"]
    job = "python -m jobs.summarize_corpus --config /etc/skipdecode/job.yaml"
    assert script.count(job) == 1
    head = RayHead({})
    environment = {**os.environ, **head.environment, "RAY_API_SERVER_ADDRESS": head.dashboard}
    client = JobSubmissionClient(head.dashboard, headers={"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"})

    def submitter(night: str, command: str) -> subprocess.Popen[bytes]:
        command = script.replace(job, command)
        return subprocess.Popen([shell, flag, command], env={**environment, "ID": night}, start_new_session=True)

    try:
        assert submitter("good", "true").wait(120) == 0
        # Ray shows the end of a failed job's log with its state.
        bad = """sh -c "echo Job \\'bad\\' succeeded; echo RUNNING PENDING; false\""""
        assert submitter("bad", bad).wait(120) != 0
        assert submitter("bad", "true").wait(120) == 0  # tried again
        first = submitter("long", "sleep 600")
        wait_until(lambda: "long" in states(client), "the submission")
        second = submitter("long", "sleep 600")  # in its place, on another node
        time.sleep(15)
        assert second.poll() is None
        assert states(client)["long"] == "RUNNING"
        os.killpg(second.pid, signal.SIGTERM)  # as the image's tini does
        assert second.wait(120) != 0
        assert first.wait(120) != 0
        assert states(client)["long"] == "STOPPED"
    finally:
        head.stop()


def states(client: JobSubmissionClient) -> dict[str | None, str]:
    """Of submitted jobs, by name."""
    return {job.submission_id: str(job.status) for job in client.list_jobs()}
