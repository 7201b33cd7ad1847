"""Kubernetes files, against KubeRay's published schemas and Kubernetes' own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jobs.summarize_corpus import SummarizeCorpus

HERE = Path(__file__).parent
KUBERAY = HERE.parents[1] / "infra" / "kuberay"
FILES = sorted(KUBERAY.glob("*.yaml"))
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


def pods(path: Path) -> list[dict[str, Any]]:
    """Pod templates: head and workers of each cluster, and what submits to it."""
    found = []
    for document in read(path):
        for cluster in clusters(document):
            found += [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
        if document["kind"] == "CronJob":
            found.append(document["spec"]["jobTemplate"]["spec"]["template"])
    return found


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
    for pod in pods(path):
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_jobs_settings_are_options_that_the_job_has(path: Path) -> None:
    settings = yaml.safe_load(of_kind(path, "ConfigMap")["data"]["job.yaml"])
    config = SummarizeCorpus(**settings)
    workers = [group for document in read(path) for spec in clusters(document) for group in spec["workerGroupSpecs"]]
    # A job that asks for more at once than the cluster starts with is refused.
    assert config.gpus_per_replica is not None
    assert config.min_replicas is not None
    assert config.min_replicas * config.gpus_per_replica <= sum(group["minReplicas"] for group in workers)
    assert config.replicas == sum(group["maxReplicas"] for group in workers)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pods_run_without_root_and_mount_what_the_command_names(path: Path) -> None:
    for pod in pods(path):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            assert container["image"] == "REGISTRY/skipdecode:0.1.0"
    head = next(clusters(read(path)))["headGroupSpec"]["template"]["spec"]
    (mounted,) = head["containers"][0]["volumeMounts"]
    assert "/etc/skipdecode/job.yaml".startswith(mounted["mountPath"])
    assert "--config /etc/skipdecode/job.yaml" in path.read_text() or "- /etc/skipdecode/job.yaml" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_gpu_workers_are_on_spot_scale_and_have_time_to_go(path: Path) -> None:
    for document in read(path):
        for cluster in clusters(document):
            assert cluster["enableInTreeAutoscaling"]
            (group,) = cluster["workerGroupSpecs"]
            spec = group["template"]["spec"]
            assert group["minReplicas"] < group["maxReplicas"]
            assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
            (worker,) = spec["containers"]
            seconds = int(shlex.split(worker["lifecycle"]["preStop"]["exec"]["command"][-1])[-1])
            assert spec["terminationGracePeriodSeconds"] > seconds
            assert "tolerations" not in cluster["headGroupSpec"]["template"]["spec"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_that_is_stopped_has_longer_than_it_waits_for_units_in_flight(path: Path) -> None:
    grace = yaml.safe_load(of_kind(path, "ConfigMap")["data"]["job.yaml"])["stop_grace_s"]
    text = path.read_text()
    _, after = text.split("RAY_JOB_STOP_WAIT_TIME_S", 1)
    assert int(after.split('"')[1 if after.startswith(":") else 2]) > grace


def test_schedules_leave_no_two_runs_at_once() -> None:
    nightly = of_kind(KUBERAY / "raycronjob.yaml", "RayCronJob")["spec"]
    assert nightly["jobTemplate"]["activeDeadlineSeconds"] < 24 * 3600
    assert nightly["jobTemplate"] == of_kind(KUBERAY / "rayjob.yaml", "RayJob")["spec"]
    cron = of_kind(KUBERAY / "cronjob.yaml", "CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_names_the_values_to_change(path: Path) -> None:
    comment = path.read_text().split("apiVersion")[0]
    for value in ("REGISTRY/skipdecode:0.1.0", "INPUT-BUCKET", "OUTPUT-BUCKET", "OWNER/MODEL", "nodeSelector"):
        assert value in comment
