"""The manifests for KubeRay: they are valid, and have what raylaunch needs."""

from __future__ import annotations

import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from raylaunch.cli.args import parser
from raylaunch.cli.config import load
from tests.examples import kuberay_crd

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/kuberay"
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())["spec"]


@pytest.fixture(params=["rayjob.yaml", "raycluster.yaml"])
def cluster(request) -> dict:
    found = read(request.param)
    return found.get("rayClusterSpec", found)


def validate(manifest: dict) -> None:
    jsonschema.validate(manifest, yaml.safe_load(kuberay_crd.SCHEMA.read_text()))


def test_the_job_is_valid():
    """For KubeRay 1.7, whose RayJob has the whole specification of a RayCluster."""
    validate(yaml.safe_load((FOLDER / "rayjob.yaml").read_text()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("backoffLimits",), 0),
        (("rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"), "8"),
        (("rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "terminationGracePeriod"), 120),
        (("rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "env", 0, "value"), 90),
        (("rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "volumes", 1, "emptyDir", "sizeLimit"), "4 GB"),
    ],
)
def test_mistakes_are_found(place, value):
    """Names that are not there, and values of other types."""
    manifest = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    at = manifest["spec"]
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


def test_both_have_the_same_cluster():
    """One is made from the other."""
    assert read("rayjob.yaml")["rayClusterSpec"] == read("raycluster.yaml")


def test_ray_is_the_version_of_the_image(cluster):
    """KubeRay chooses options of `ray start` by it."""
    assert f"FROM rayproject/ray:{cluster['rayVersion']}-" in (FOLDER / "Dockerfile").read_text()


def test_the_cluster_is_authenticated_and_grows(cluster):
    """Version 1 of the autoscaler does not understand what elastic jobs request."""
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"


def test_a_pod_that_is_deleted_is_drained_first(cluster):
    """SIGTERM comes to `ray start`, and what follows it has time."""
    (group,) = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert "lifecycle" not in container
    assert container["args"][0].endswith("; exec $KUBERAY_GEN_RAY_START_CMD")
    assert group["template"]["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (seconds,) = [int(each["value"]) for each in container["env"] if each["name"] == DRAIN]
    assert pod["terminationGracePeriodSeconds"] > seconds


def test_the_job_is_raylaunch_s(cluster):
    """Its command line is right, it fits the workers, and only raylaunch starts it again."""
    job = read("rayjob.yaml")
    assert job["backoffLimit"] == 0
    python, module, name, *words = shlex.split(job["entrypoint"])
    assert (python, module, name) == ("python", "-m", "raylaunch")
    words = [word.replace("/app/", f"{ROOT}/examples/") for word in words]
    found = load.load(parser.parse(words, {}), {})
    (group,) = cluster["workerGroupSpecs"]
    assert (found.min_nodes, found.max_nodes) == (group["minReplicas"], group["maxReplicas"])
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert found.nproc_per_node == int(limits["cpu"])
