"""The autoscaler's file, bucket policies, lifecycle rules and the image, against published schemas."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

INFRA = Path(__file__).parents[2] / "infra"
# What the pipeline does with objects; nothing else may be granted.
NEEDED = {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}


def policy(name: str) -> list[dict[str, Any]]:
    content = json.loads((INFRA / "storage" / name).read_text())
    assert content["Version"] == "2012-10-17"
    return list(content["Statement"])


def test_the_autoscalers_file_is_what_ray_accepts() -> None:
    config = yaml.safe_load((INFRA / "ray-cluster/aws.yaml").read_text())
    validate_config(prepare_config(config))
    workers = config["available_node_types"]["gpu_spot"]
    assert workers["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    with pytest.raises(Exception, match="max_wrokers"):
        validate_config({**config, "max_wrokers": 3})


def test_no_node_serves_a_stranger_or_listens_to_the_outside() -> None:
    config = yaml.safe_load((INFRA / "ray-cluster/aws.yaml").read_text())
    for command in [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]:
        assert "ray start" not in command or "RAY_AUTH_MODE=token ray start" in command
    # The token comes from the user's home, where Ray looks for it; without one `ray up` ends here, and so would Ray.
    (target,) = config["file_mounts"]
    assert config["file_mounts"][target] == "~/.ray/auth_token"
    home = re.search(r"HOME=(\S+)", (INFRA / "container/Dockerfile").read_text())
    assert home is not None
    assert target == f"{home[1]}/.ray/auth_token"
    assert config["provider"]["use_internal_ips"]
    assert config["auth"]["ssh_proxy_use_node_id"]
    for node in config["available_node_types"].values():
        # Where there is no group, Ray makes one with port 22 open to the internet.
        assert node["node_config"]["SecurityGroupIds"]
        assert node["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    assert "--dashboard-host=127.0.0.1" in " ".join(config["head_start_ray_commands"])


def test_ray_refuses_to_start_a_head_that_has_no_token() -> None:
    """What aws.yaml relies on."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "HOME": "/nonexistent"}
    environment.pop("RAY_AUTH_TOKEN", None)
    asked = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--port=0", "--include-dashboard=false"]
    started = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120)
    assert started.returncode != 0
    assert "token" in started.stderr


def test_the_head_may_start_and_end_workers_and_workers_may_not() -> None:
    config = yaml.safe_load((INFRA / "ray-cluster/aws.yaml").read_text())
    nodes = config["available_node_types"]
    profiles = {name: node["node_config"]["IamInstanceProfile"]["Arn"].split("/")[1] for name, node in nodes.items()}
    assert profiles == {"head": "skipdecode-head", "gpu_spot": "skipdecode"}
    statements = json.loads((INFRA / "ray-cluster/head-policy.json").read_text())["Statement"]
    granted: dict[str, list[dict[str, Any]]] = {}
    for statement in statements:
        for action in statement["Action"]:
            granted.setdefault(action, []).append(statement.get("Condition", {}).get("StringEquals", {}))
    ours = {"ec2:ResourceTag/ray-cluster-name": config["cluster_name"]}
    assert granted == {
        "ec2:DescribeInstances": [{}], "ec2:RunInstances": [{}], "iam:PassRole": [{}],
        "ec2:TerminateInstances": [ours],
        # Who may tag any instance so may end it.
        "ec2:CreateTags": [{"ec2:CreateAction": "RunInstances"}, ours],
    }  # fmt: skip
    assert statements[-1]["Resource"] == ["arn:aws:iam::ACCOUNT:role/skipdecode"]


@pytest.mark.parametrize("node", ["head", "gpu_spot"])
def test_nodes_are_described_in_ec2s_own_parameters(node: str) -> None:
    config = yaml.safe_load((INFRA / "ray-cluster/aws.yaml").read_text())
    given = config["available_node_types"][node]["node_config"]
    given = {**given, "SubnetId": given["SubnetIds"][0], "MinCount": 1, "MaxCount": 1}
    del given["SubnetIds"]  # Ray's own: it takes one of them
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    assert not ParamValidator().validate(given, shape).has_errors()


def test_lifecycle_rules_are_valid_and_remove_unfinished_uploads() -> None:
    rules = json.loads((INFRA / "storage/lifecycle.json").read_text())
    model = botocore.session.get_session().get_service_model("s3")
    shape = model.operation_model("PutBucketLifecycleConfiguration").input_shape
    report = ParamValidator().validate({"Bucket": "b", "LifecycleConfiguration": rules}, shape)
    assert not report.has_errors(), report.generate_report()
    assert any("AbortIncompleteMultipartUpload" in rule for rule in rules["Rules"])
    # Nothing may ever expire what is committed.
    assert not any("Expiration" in rule for rule in rules["Rules"])


def test_the_role_may_do_what_the_job_does_and_nothing_else() -> None:
    granted: dict[str, set[str]] = {}
    for statement in policy("iam-policy.json"):
        assert statement["Effect"] == "Allow"
        for resource in statement["Resource"]:
            assert re.fullmatch(r"arn:aws:s3:::(INPUT|OUTPUT)-BUCKET(/(corpus|summaries)(/\*)?)?", resource)
            granted.setdefault(resource, set()).update(statement["Action"])
        if "s3:ListBucket" in statement["Action"]:
            assert statement["Condition"]["StringLike"]["s3:prefix"]
    assert set().union(*granted.values()) == NEEDED
    assert granted["arn:aws:s3:::INPUT-BUCKET/corpus/*"] == {"s3:GetObject"}
    assert granted["arn:aws:s3:::INPUT-BUCKET/corpus"] == {"s3:GetObject"}  # asked for, to tell a file from a folder
    assert granted["arn:aws:s3:::INPUT-BUCKET"] == {"s3:ListBucket"}


def test_the_bucket_refuses_plain_connections_and_commits_that_could_replace_others() -> None:
    statements = {statement["Sid"]: statement for statement in policy("bucket-policy.json")}
    assert all(statement["Effect"] == "Deny" for statement in statements.values())
    assert statements["EncryptedConnectionsOnly"]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert statements["CommitsAreWrittenOnce"]["Resource"] == [
        "arn:aws:s3:::OUTPUT-BUCKET/summaries/_commits/*",
        "arn:aws:s3:::OUTPUT-BUCKET/summaries/*/_commits/*",  # of runs below, such as the one behind a data set
    ]
    # Deny where the header is absent: "Null": "true" matches requests without it.
    assert statements["CommitsAreWrittenOnce"]["Condition"] == {"Null": {"s3:if-none-match": "true"}}


def test_the_image_is_pinned_and_runs_without_root() -> None:
    lines = (INFRA / "container/Dockerfile").read_text().splitlines()
    (base,) = [line.removeprefix("ARG VLLM_IMAGE=") for line in lines if line.startswith("ARG VLLM_IMAGE=")]
    image, tag = base.split(":v")
    assert image == "vllm/vllm-openai"
    extras = tomllib.loads((INFRA.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = map(Requirement, extras["vllm"])
    assert wanted.specifier.contains(tag)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "1000"
    copied = [part for line in lines if line.startswith("COPY ") for part in line.split()[1:-1]]
    allowed = (INFRA / "container/Dockerfile.dockerignore").read_text()
    for source in copied:
        assert (INFRA.parent / source).exists()
        assert f"!{source}" in allowed


def test_the_image_keeps_what_vllms_has_and_pins_the_rest(tmp_path: Path) -> None:
    """The lists that its build makes, made in this environment."""
    text = (INFRA / "container/Dockerfile").read_text()
    program = text.split("<<'LISTS'")[1].split("\n", 1)[1].split("\nLISTS\n")[0].replace("/tmp/", f"{tmp_path}/")
    environment = {**os.environ, "EXTRAS": "gcs azure"}
    subprocess.run([sys.executable, "-c", program], cwd=INFRA.parent, check=True, env=environment)
    lists = {name: (tmp_path / f"{name}.txt").read_text().splitlines() for name in ("constraints", "requirements")}
    pins = dict(line.split("==") for line in lists["constraints"])
    assert len(pins) == len(lists["constraints"])
    assert pins["torch"] == version("torch")
    wanted = {canonicalize_name(each.name): each for each in map(Requirement, lists["requirements"])}
    assert {"gcsfs", "adlfs", "boto3", "s3fs", "ray"} <= wanted.keys()
    # Clients of AWS hang on exact versions of one another: what the image has of them must not decide.
    assert not {"botocore", "aiobotocore", "s3fs", "boto3"} & pins.keys()
    for name, requirement in wanted.items():
        assert name not in pins or requirement.specifier.contains(pins[name]), requirement
