"""Makes `schemas/` from what the projects publish: what validation needs, and nothing else.

    python -m tests.k8s.slim_schemas CRDS KUBERNETES

CRDS is a folder of CustomResourceDefinitions as their projects ship them; KUBERNETES the folder of
one Kubernetes version in the `kubernetes-validate` wheel
(`kubernetes-json-schema/v…-local-strict`). Descriptions go, and so do versions that are not served
under the name used here. Unknown fields are refused afterwards, as `kubectl` does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = {"ray.io": "v1", "kueue.x-k8s.io": "v1beta2", "monitoring.coreos.com": "v1"}
KINDS = (
    "configmap-v1",
    "deployment-apps-v1",
    "namespace-v1",
    "serviceaccount-v1",
    "persistentvolumeclaim-v1",
    "priorityclass-scheduling-v1",
    "role-rbac-v1",
    "rolebinding-rbac-v1",
    "networkpolicy-networking-v1",
    "poddisruptionbudget-policy-v1",
    "daemonset-apps-v1",
)


def strict(schema: Any) -> Any:
    """Without descriptions; integers or strings as such; no field that is not named."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: strict(field) for name, field in value.items()}
        if key in ("properties", "$defs")
        else strict(value)
        for key, value in schema.items()
        if key not in ("description", "$id", "$schema") and not key.startswith("x-kubernetes-")
    }
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in made and not open_ended:
        made.setdefault("additionalProperties", False)
    return made


def custom(path: Path) -> tuple[str, Any]:
    """(kind, schema) of one CustomResourceDefinition, in the version used here."""
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
    [version] = (v for v in definition["versions"] if v["name"] == VERSIONS[definition["group"]])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return f"{definition['names']['kind']}.{definition['group']}", schema


def core(folder: Path) -> Any:
    """The kinds of KINDS and the definitions they lead to, as one schema."""
    there = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in KINDS}
    reached: dict[str, Any] = {}
    waiting = list(kinds.values())
    while waiting:
        for name in set(_references(waiting.pop())) - set(reached):
            reached[name] = there[name]
            waiting.append(there[name])
    made = strict({"$defs": kinds | reached})
    return json.loads(json.dumps(made).replace("/api/_definitions.json#/$defs/", "#/$defs/"))


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for item in schema for name in _references(item)]
    if not isinstance(schema, dict):
        return []
    here = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return here + [name for value in schema.values() for name in _references(value)]


def main(crds: str, kubernetes: str) -> None:
    for path in sorted(Path(crds).glob("*.yaml")):
        _write(*custom(path))
    _write("kubernetes", core(Path(kubernetes)))


def _write(name: str, schema: Any) -> None:
    text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
    (SCHEMAS / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
