"""What `kubectl kustomize` makes of our folders, for machines that have no kubectl.

Only what deploy/kubernetes uses: resources, components, settings (configMapGenerator), images,
patches by strategic merge and by JSON patch; anything else is an error. Where kubectl is installed,
test_kubernetes.py compares the two. Names of ConfigMaps get no hash here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

Thing = dict[str, Any]
_KNOWN = {
    *("apiVersion", "kind", "resources", "components", "configMapGenerator"),
    *("generatorOptions", "images", "patches", "nameSuffix"),
}
# By what an element of a list is known, as Kubernetes' own types say.
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}
_WHOLE = {"tolerations", "args", "command", "accessModes"}  # replaced, not merged


def render(folder: Path) -> list[Thing]:
    things: list[Thing] = []
    _apply(folder.resolve(), things)
    return things


def _apply(folder: Path, things: list[Thing]) -> None:
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := plan.keys() - _KNOWN:
        raise ValueError(f"{folder}: tests/deploy/kustomize.py does not know {sorted(unknown)}")
    for name in plan.get("resources", []):
        place = folder / name
        if place.is_dir():
            things += render(place)
        else:
            # Through JSON: what YAML writes once and names twice must be two.
            things += json.loads(json.dumps(list(yaml.safe_load_all(place.read_text()))))
    for name in plan.get("components", []):
        _apply((folder / name).resolve(), things)
    for generator in plan.get("configMapGenerator", []):
        _generate(generator, plan.get("generatorOptions", {}), things)
    for patch in plan.get("patches", []):
        _patch(folder, patch, things)
    for image in plan.get("images", []):
        for thing in things:
            _rename(image, thing)
    if suffix := plan.get("nameSuffix"):
        _add_suffix(suffix, things)


def _generate(generator: Thing, options: Thing, things: list[Thing]) -> None:
    pairs = dict(line.split("=", 1) for line in generator["literals"])
    if generator.get("behavior") == "merge":
        _find(things, "ConfigMap", generator["name"])["data"] |= pairs
        return
    metadata = {"name": generator["name"], **copy.deepcopy(options)}
    things.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": pairs})


def _patch(folder: Path, patch: Thing, things: list[Thing]) -> None:
    if "path" in patch:
        for change in yaml.safe_load_all((folder / patch["path"]).read_text()):
            _merge(_find(things, change["kind"], change["metadata"]["name"]), change)
        return
    for target in _targets(things, **patch["target"]):
        _patch_one(folder, yaml.safe_load(patch["patch"]), target)


def _targets(
    things: list[Thing], kind: str, name: str = "", labelSelector: str = ""
) -> list[Thing]:
    label, _, value = labelSelector.partition("=")
    return [
        thing
        for thing in things
        if thing["kind"] == kind
        and name in ("", thing["metadata"]["name"])
        and (not label or thing["metadata"].get("labels", {}).get(label) == value)
    ]


def _patch_one(folder: Path, steps: list[Thing], target: Thing) -> None:
    for step in steps:
        *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
        place: Any = target
        for part in way:
            place = place[int(part) if isinstance(place, list) else part]
        if step["op"] == "remove":
            del place[int(last) if isinstance(place, list) else last]
        elif step["op"] == "add" and last == "-":
            place.append(step["value"])
        elif step["op"] in ("add", "replace"):
            key = int(last) if isinstance(place, list) else last
            if step["op"] == "replace" and not isinstance(place, list):
                place[key]  # must be there
            place[key] = step["value"]
        else:
            raise ValueError(f"{folder}: tests/deploy/kustomize.py does not know {step['op']}")


def _find(things: list[Thing], kind: str, name: str) -> Thing:
    (found,) = [t for t in things if (t["kind"], t["metadata"]["name"]) == (kind, name)]
    return found


def _merge(thing: Thing, change: Thing) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(thing.get(key), dict):
            _merge(thing[key], value)
        elif isinstance(value, list) and key not in _WHOLE and isinstance(thing.get(key), list):
            _merge_list(thing[key], value, _KEYS.get(key, "name"))
        else:
            thing[key] = copy.deepcopy(value)


def _merge_list(there: list[Thing], changes: list[Thing], by: str) -> None:
    for change in changes:
        same = [each for each in there if each[by] == change[by]]
        if same:
            _merge(same[0], change)
        else:
            there.append(copy.deepcopy(change))


def _add_suffix(suffix: str, things: list[Thing]) -> None:
    """Settings are the only thing that others refer to by name where we use this."""
    for thing in things:
        if thing["kind"] not in ("Deployment", "ConfigMap"):
            raise ValueError(f"tests/deploy/kustomize.py does not know a suffix of {thing['kind']}")
        thing["metadata"]["name"] += suffix
        pod = thing.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*pod.get("containers", []), *pod.get("initContainers", [])]:
            for source in container.get("envFrom", []):
                source["configMapRef"]["name"] += suffix


def _rename(image: Thing, thing: Any) -> None:
    if isinstance(thing, list):
        for each in thing:
            _rename(image, each)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            name, _, tag = value.partition(":") if isinstance(value, str) else ("", "", "")
            if key == "image" and name == image["name"]:
                thing[key] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
            else:
                _rename(image, value)
