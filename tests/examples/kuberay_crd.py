"""KubeRay's schema of a RayJob, without what the manifests of `examples/kuberay` do not use: the CRD is 1.4 MB.

    python -m tests.examples.kuberay_crd ray.io_rayjobs.yaml    # from ray-operator/config/crd/bases of KubeRay

writes `kuberay_crd.yaml` anew, for another version or when a manifest uses more. The names of all fields beside those
that are used are there, and of these also the types. As with `kubectl`'s strict validation, other names are refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).parents[2] / "examples/kuberay/rayjob.yaml"
SCHEMA = Path(__file__).with_suffix(".yaml")
_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "anyOf")


def trimmed(schema: dict[str, Any], values: list[Any]) -> Any:
    """Return what a schema says of these values, which are all at this place; True: anything may be there."""
    if not values:
        return True
    found = {name: schema[name] for name in _KEPT if name in schema}
    if "properties" in schema:
        found["properties"] = {
            name: trimmed(one, [value[name] for value in values if name in value])
            for name, one in schema["properties"].items()
        }
        found["additionalProperties"] = False
    elif isinstance(one := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = trimmed(one, [each for value in values for each in value.values()])
    if "items" in schema:
        found["items"] = trimmed(schema["items"], [each for value in values for each in value])
    return found


def main(path: str) -> None:
    """Write the schema of version v1 in a file of KubeRay's."""
    crd = yaml.load(Path(path).read_text(), yaml.CSafeLoader)
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1"]
    text = yaml.dump(trimmed(schema, [yaml.safe_load(MANIFEST.read_text())]), width=118, default_flow_style=None)
    SCHEMA.write_text(f"# Made from the CRD of KubeRay (Apache License 2.0) by kuberay_crd.py, see there.\n{text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
