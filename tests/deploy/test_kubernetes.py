"""Every overlay of deploy/kubernetes, alone and with every component: it renders, the schemas of
Kubernetes and of the operators accept it, and it agrees with the server and with itself.

Without kubectl our own rendering (kustomize.py) is tested; with it, both, and that they are equal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from tests.deploy.custom_kinds import CUSTOM_KINDS
from tests.deploy.kustomize import Thing, render

from headrace.cli.commands import app
from headrace.core.server_config import ServerConfig
from headrace.core.settings import all_settings, resolve_settings
from headrace.router.discover import parse_discover
from headrace.server.api.routes import all_routes
from headrace.server.link.supervisor import SHUT_DOWN_S

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
# What is rendered: "overlay", or "overlay+component+component".
OPTIONAL = "+".join(each for each in COMPONENTS if each not in ("router", "router-by-api"))
ALL = [".", *OVERLAYS, *(f"{overlay}+{OPTIONAL}" for overlay in OVERLAYS), "gpu+router+keda"]
KUBECTL = shutil.which("kubectl")
PROMTOOL = shutil.which("promtool")
OLDEST = "1.29.0"  # of Kubernetes, that the documents name
ROUTER_PATHS = {"/health", "/ready", "/metrics"}


def plan_of(name: str, folder: Path) -> Path:
    """The folder to render: an overlay's own, or one with components, as a user would write it."""
    overlay, *components = name.split("+")
    if not components:
        return FOLDER if overlay == "." else FOLDER / "overlays" / overlay
    here = Path(os.path.relpath(FOLDER, folder))
    plan = {
        "resources": [str(here / "overlays" / overlay)],
        "components": [str(here / "components" / each) for each in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    return folder


@pytest.fixture(params=ALL, scope="module")
def things(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Thing]:
    return render(plan_of(request.param, tmp_path_factory.mktemp("plan")))


def of_kind(things: list[Thing], kind: str) -> list[Thing]:
    return [thing for thing in things if thing["kind"] == kind]


def pods(things: list[Thing]) -> list[Thing]:
    return [each["spec"]["template"] for each in of_kind(things, "Deployment")]


def containers(things: list[Thing]) -> list[Thing]:
    specs = [pod["spec"] for pod in pods(things)]
    return [c for spec in specs for c in [*spec["containers"], *spec.get("initContainers", [])]]


def is_server(thing: Thing) -> bool:
    """Whether a pod has a model, and is no router."""
    labels: dict[str, str] = thing["metadata"]["labels"]
    return labels["app.kubernetes.io/component"] != "router"


# -- rendering and schemas -------------------------------------------------------------------------


def in_order(value: Any) -> Any:
    """Lists of named things by name, as their order means nothing; no hash in a ConfigMap's
    name."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list):
        return sorted(
            (in_order(each) for each in value), key=lambda e: json.dumps(e, sort_keys=True)
        )
    if isinstance(value, str):
        return re.sub(r"^(headrace-settings\S*)-[a-z0-9]{10}$", r"\1", value)
    return value


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl: apt-get install kubernetes-client")
@pytest.mark.parametrize("name", [*ALL[: 1 + len(OVERLAYS)], *ALL[-2:]])
def test_kubectl_renders_the_same(name: str, tmp_path: Path) -> None:
    folder = plan_of(name, tmp_path)
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert in_order(list(yaml.safe_load_all(done.stdout))) == in_order(render(folder))


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_kubernetes_accepts_it(things: list[Thing], version: str) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, which is in the group dev"
    )
    wanted = validator.latest_version() if version == "newest" else version
    for thing in things:
        if thing["kind"] not in CUSTOM_KINDS:
            used = validator.validate(thing, wanted, strict=True)
            assert wanted.startswith(used)
            with pytest.raises(validator.ValidationError):  # it does look
                validator.validate({**thing, "spek": {}}, wanted, strict=True)


def test_operators_accept_it(things: list[Thing]) -> None:
    for thing in things:
        if schema := CUSTOM_KINDS.get(thing["kind"]):
            jsonschema.validate(thing, schema)


def test_every_custom_kind_is_used(tmp_path: Path) -> None:
    found = {thing["kind"] for thing in render(plan_of(f"cpu+{OPTIONAL}", tmp_path))}
    assert CUSTOM_KINDS.keys() <= found


@pytest.mark.skipif(
    not os.environ.get("HEADRACE_TEST_CRDS"),
    reason="set HEADRACE_TEST_CRDS to a folder with the operators' CustomResourceDefinitions",
)
def test_operators_own_definitions_accept_it(things: list[Thing]) -> None:
    schemas = {}
    for path in Path(os.environ["HEADRACE_TEST_CRDS"]).glob("*.yaml"):
        definition = yaml.safe_load(path.read_text())["spec"]
        for version in definition["versions"]:
            key = f"{definition['group']}/{version['name']}", definition["names"]["kind"]
            schemas[key] = _closed(version["schema"]["openAPIV3Schema"])
    for thing in things:
        if thing["kind"] in CUSTOM_KINDS:
            jsonschema.validate(thing, schemas[thing["apiVersion"], thing["kind"]])


def _closed(schema: Any) -> Any:
    """Unknown fields are errors, as in a strict `kubectl apply`."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    properties = found.get("properties")
    is_object = isinstance(properties, dict) and found.get("type") == "object"
    if is_object and "metadata" not in (properties or {}) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


# -- one with another ------------------------------------------------------------------------------


def test_every_selector_finds_pods(things: list[Thing]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(things)]
    for thing in things:
        spec = thing.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        matched = [each for each in labels if wanted.items() <= each.items()]
        assert matched, (thing["kind"], thing["metadata"]["name"])
        if thing["kind"] in ("Deployment", "Service", "InferencePool", "PodDisruptionBudget"):
            components = {each["app.kubernetes.io/component"] for each in matched}
            assert len(components) == 1, (thing["kind"], components)


def test_services_lead_to_ports(things: list[Thing]) -> None:
    for service in of_kind(things, "Service"):
        selector = service["spec"]["selector"]
        for pod in pods(things):
            if selector.items() <= pod["metadata"]["labels"].items():
                (container,) = pod["spec"]["containers"]
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                for port in service["spec"]["ports"]:
                    assert port["targetPort"] in ports
                    if service["spec"].get("clusterIP") == "None":  # its ports are the pods'
                        assert port["port"] == ports[port["targetPort"]]
    for pool in of_kind(things, "InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": ServerConfig().port}]
    for route in of_kind(things, "HTTPRoute"):
        names = {pool["metadata"]["name"] for pool in of_kind(things, "InferencePool")}
        assert {ref["name"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]} <= (
            names
        )


def test_claims_and_mounts_are_there(things: list[Thing]) -> None:
    claims = {claim["metadata"]["name"] for claim in of_kind(things, "PersistentVolumeClaim")}
    settings = {each["metadata"]["name"] for each in of_kind(things, "ConfigMap")}
    for pod in pods(things):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            assert ("emptyDir" in volume) != ("persistentVolumeClaim" in volume)
    for container in containers(things):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | {
            *("models", "state", "tmp", "triton", "shm")
        }
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] in settings


def test_disruptions_leave_one_and_move_on(things: list[Thing]) -> None:
    for budget in of_kind(things, "PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        for deployment in of_kind(things, "Deployment"):
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            if wanted.items() <= labels.items() and "replicas" in deployment["spec"]:
                assert 1 <= budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_an_autoscaled_number_is_the_autoscalers(things: list[Thing]) -> None:
    deployments = {each["metadata"]["name"]: each for each in of_kind(things, "Deployment")}
    for scaler in of_kind(things, "ScaledObject"):
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]
        assert is_server(target)
        assert scaler["spec"]["minReplicaCount"] <= scaler["spec"]["fallback"]["replicas"]
        assert scaler["spec"]["fallback"]["replicas"] <= scaler["spec"]["maxReplicaCount"]


# -- with the server and the router ----------------------------------------------------------------


def test_probes_ask_paths_that_need_no_key(things: list[Thing]) -> None:
    open_paths = {route.path for route in all_routes() if route.is_open}
    for pod in pods(things):
        (container,) = pod["spec"]["containers"]
        port, *others = container["ports"]
        assert all(other["name"] == "blocks" for other in others)
        known = open_paths if is_server(pod) else ROUTER_PATHS
        wanted = ServerConfig().port if is_server(pod) else 8080
        assert port == {"name": "http", "containerPort": wanted}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == "http"
            assert asked["path"] in known
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        # An engine that restarts is not ready, and must not be killed for it.
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        notes = pod["metadata"]["annotations"]
        assert notes["prometheus.io/port"] == str(port["containerPort"])
        assert notes["prometheus.io/path"] in {route.path for route in all_routes()}


def test_a_pod_has_time_to_drain(things: list[Thing]) -> None:
    (settings,) = of_kind(things, "ConfigMap")[:1]
    for pod in pods(things):
        (container,) = pod["spec"]["containers"]
        pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain_s = float(settings["data"]["HEADRACE_DRAIN_TIMEOUT_S"])
        if not is_server(pod):
            (drain,) = [a for a in container["args"] if a.startswith("--drain=")]
            drain_s = float(drain.partition("=")[2])
        assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + drain_s + SHUT_DOWN_S
        # Or a Service named headrace would set HEADRACE_PORT.
        assert pod["spec"]["enableServiceLinks"] is False


def test_a_pod_may_do_little(things: list[Thing]) -> None:
    for pod in pods(things):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # A token only for who asks the cluster's own API.
        (container,) = spec["containers"]
        asks = any("kubernetes:" in argument for argument in container["args"])
        assert spec["automountServiceAccountToken"] is asks
        assert ("serviceAccountName" in spec) is asks
    for container in containers(things):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert set(container["resources"]) == {"requests", "limits"}
        for mount in container["volumeMounts"]:
            if mount["name"] == "models":  # only the init container writes there
                assert mount.get("readOnly", False) is (container["name"] != "fetch-model")


def test_settings_and_flags_are_understood(things: list[Thing]) -> None:
    for each in of_kind(things, "ConfigMap"):
        resolve_settings({}, each["data"], None)
    settings = of_kind(things, "ConfigMap")[0]["data"]
    for container in containers(things):
        command = container.get("command", ["headrace", "serve"])  # the image's own
        words = [*command[1:], *container.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda m: settings[m[1]], word) for word in words]
        if has_roles() or not {word.partition("=")[0] for word in words} & {"--role", "--prefill"}:
            parse(words)
        for word in words:
            if word.startswith("--discover="):
                parse_discover(word.partition("=")[2])


def has_roles() -> bool:
    return any(setting.name == "role" for setting in all_settings())


def parse(words: list[str]) -> None:
    """Raises for a command or a flag that there is not; runs nothing."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("headrace", list(words), resilient_parsing=False)
    while getattr(command, "commands", None):
        rest = [*context._protected_args, *context.args]
        _, command, arguments = command.resolve_command(context, rest)
        context = command.make_context(command.name, arguments, parent=context)


def test_images_are_built_by_a_file_of_ours(things: list[Thing]) -> None:
    built = {}
    for name in ("Dockerfile", "Dockerfile.cuda"):
        (tag,) = re.findall(r"Build: docker build.* -t (\S+) \.", (ROOT / name).read_text())
        built[tag] = name
    for container in containers(things):
        image = container["image"].partition(":")[0]
        assert image in built
        asks_for_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert not asks_for_gpu or image == "headrace-cuda"


# -- what the autoscaler asks Prometheus -----------------------------------------------------------

LATE = """
rule_files: [rules.yaml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
"""
_SERIES = {
    'headrace:pending_prefill_seconds{namespace="default",pod="a"}': "0 0.5 0.5",
    'headrace:pending_prefill_seconds{namespace="default",pod="b"}': "0 0.25 0",
    'headrace:pending_prefill_seconds{namespace="other",pod="c"}': "9 9 9",
    'headrace:saturation{namespace="default",pod="a"}': "0.5 1 1",
    'headrace:saturation{namespace="default",pod="b"}': "0.25 1 0.5",
    'headrace:slo_headroom{namespace="default",pod="a"}': "-1 -0.5 0.5",
    'headrace:slo_headroom{namespace="default",pod="b"}': "0.5 0.5 -0.5",
}
LATE += "".join(f"      - {{series: '{n}', values: '{v}'}}\n" for n, v in _SERIES.items())
LATE += "    promql_expr_test:\n"
# At each moment: seconds that wait in all, places in use in all, and 1.25 while somebody is late
# and has prompts waiting: late with an empty queue (at first, and pod b at the end) is not.
SEEN = {"pending": (0, 0.75, 0.5), "saturation": (0.75, 2, 1.5), "headroom": (0, 1.25, 0)}


def queries() -> dict[str, str]:
    text = (FOLDER / "components/keda/scaled-object.yaml").read_text()
    triggers = yaml.safe_load(text)["spec"]["triggers"]
    return {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers}


def test_the_autoscaler_asks_for_what_was_tested() -> None:
    assert queries().keys() == SEEN.keys()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
def test_prometheus_answers_the_autoscaler(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("groups: []\n")
    text = LATE
    for name, values in SEEN.items():
        for place, value in enumerate(values):
            expression = yaml.safe_dump(queries()[name], default_style='"', width=10_000).strip()
            text += f"      - expr: {expression}\n        eval_time: {15 * place}s\n"
            text += f"        exp_samples: [{{value: {value}}}]\n"
    (tmp_path / "test.yaml").write_text(text)
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(tmp_path / "test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
