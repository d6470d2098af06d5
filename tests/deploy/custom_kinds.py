"""What KEDA, the inference extension, the Gateway API and the Prometheus operator accept, as far as
we use it: read off their CustomResourceDefinitions of August 2026, written down anew and closed, so
that a misspelt field is an error. With HEADRACE_TEST_CRDS=FOLDER, test_kubernetes.py takes their
own definitions from there too.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def closed(required: str, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(items: Schema, most: int = 16) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _kind(version: str, kind: str, spec: Schema) -> Schema:
    return closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=closed("name", name=TEXT, labels=LABELS),
        spec=spec,
    )


_POLICY = closed(
    "type value periodSeconds",
    type=one_of("Pods", "Percent"),
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
_RULES = closed(
    "",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=listed(_POLICY),
    selectPolicy=one_of("Max", "Min", "Disabled"),
)
# KEDA reads every value of a trigger's metadata as text.
_PROMETHEUS = closed(
    "serverAddress query threshold",
    serverAddress={"type": "string", "pattern": "^https?://"},
    query=TEXT,
    threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
    activationThreshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
)
SCALED_OBJECT = _kind(
    "keda.sh/v1alpha1",
    "ScaledObject",
    closed(
        "scaleTargetRef triggers",
        scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        fallback=closed(
            "failureThreshold replicas",
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher"),
        ),
        advanced=closed(
            "",
            horizontalPodAutoscalerConfig=closed(
                "", behavior=closed("", scaleUp=_RULES, scaleDown=_RULES)
            ),
        ),
        triggers=listed(
            closed(
                "type metadata",
                type={"const": "prometheus"},
                name=TEXT,
                metricType=one_of("AverageValue", "Value"),
                metadata=_PROMETHEUS,
            )
        ),
    ),
)
INFERENCE_POOL = _kind(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    closed(
        "selector targetPorts endpointPickerRef",
        selector=closed("matchLabels", matchLabels=LABELS),
        targetPorts=listed(closed("number", number=PORT), 8),
        appProtocol=one_of("http", "kubernetes.io/h2c"),
        endpointPickerRef=closed(
            "name",
            group={"type": "string"},
            kind=TEXT,
            name=TEXT,
            port=closed("number", number=PORT),
            failureMode=one_of("FailOpen", "FailClose"),
        ),
    ),
)
HTTP_ROUTE = _kind(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    closed(
        "parentRefs rules",
        parentRefs=listed(closed("name", group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT)),
        hostnames=listed(TEXT),
        rules=listed(
            closed(
                "backendRefs",
                matches=listed(
                    closed(
                        "path",
                        path=closed(
                            "type value",
                            type=one_of("Exact", "PathPrefix", "RegularExpression"),
                            value={"type": "string", "pattern": "^/"},
                        ),
                    )
                ),
                backendRefs=listed(closed("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT)),
                timeouts=closed(
                    "", request={"type": "string", "pattern": r"^(\d{1,5}(h|m|s|ms))+$"}
                ),
            )
        ),
    ),
)
_SECRET = closed("key", name=TEXT, key=TEXT, optional={"type": "boolean"})
POD_MONITOR = _kind(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    closed(
        "selector podMetricsEndpoints",
        selector=closed("", matchLabels=LABELS),
        podMetricsEndpoints=listed(
            closed(
                "port",
                port=TEXT,
                path={"type": "string", "pattern": "^/"},
                interval={"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                authorization=closed("credentials", type=TEXT, credentials=_SECRET),
            )
        ),
    ),
)
CUSTOM_KINDS = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (SCALED_OBJECT, INFERENCE_POOL, HTTP_ROUTE, POD_MONITOR)
}
