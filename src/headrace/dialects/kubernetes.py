"""A Deployment and a Service for Kubernetes, in YAML, as deploy/kubernetes/ has them for Headrace.

Strings are written as JSON, which is YAML too: nothing in a value can become structure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.core.foreign.words import Engine
from headrace.dialects.deployment import Deployment

# An engine's image; a tag is that of the version whose flags are written.
IMAGES = {
    "headrace": "headrace:latest",
    "vllm": "vllm/vllm-openai:v",
    "sglang": "lmsysorg/sglang:v",
}
_PORT = 8000
# What has to be up for requests to come, and for the process to be left alone.
_PROBES = {"headrace": ("/ready", "/health")}
_OWN_ENVIRONMENT = """\
          env:
            - {name: HEADRACE_LOG_FORMAT, value: json}
            # By any name: Services and gateways have their own.
            - {name: HEADRACE_ALLOWED_HOST, value: "*"}
            - name: HEADRACE_API_KEY
              valueFrom:
                secretKeyRef: {name: headrace-key, key: key, optional: true}
"""
_OWN_POD = """\
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {type: RuntimeDefault}
"""
_OWN_CONTAINER = """\
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          lifecycle:
            preStop:
              # Proxies need a moment to hear that this pod is going; then SIGTERM drains.
              exec: {command: [sleep, "5"]}
"""
_TEMPLATE = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: {name}
    app.kubernetes.io/component: model-server
spec:
  replicas: {replicas}
  selector:
    matchLabels:
      app.kubernetes.io/name: {name}
  strategy:
    rollingUpdate: {{maxUnavailable: 0, maxSurge: 1}}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {name}
        app.kubernetes.io/component: model-server
    spec:
      terminationGracePeriodSeconds: 60
      automountServiceAccountToken: false
      # Or a Service called headrace would come as HEADRACE_PORT: tcp://...
      enableServiceLinks: false
{pod}      containers:
        - name: {name}
          image: {image}
{command}          args: {arguments}
{environment}          ports:
            - {{name: http, containerPort: {port}}}
          # Until it has been ready once: weights may come over a slow network.
          startupProbe:
            httpGet: {{path: {ready}, port: http}}
            periodSeconds: 5
            failureThreshold: 360
          readinessProbe:
            httpGet: {{path: {ready}, port: http}}
            periodSeconds: 2
            failureThreshold: 1
          livenessProbe:
            httpGet: {{path: {health}, port: http}}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          resources:
            limits: {{nvidia.com/gpu: {gpus}}}
{container}          volumeMounts:
            - {{name: models, mountPath: {folder}}}
            - {{name: {scratch}, mountPath: {scratch_folder}}}
      volumes:
        - name: models
          persistentVolumeClaim: {{claimName: {name}-models}}
        - name: {scratch}
          emptyDir: {{{medium}}}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: {name}
spec:
  selector:
    app.kubernetes.io/name: {name}
  ports:
    - {{name: http, port: 80, targetPort: http}}"""


def manifests(engine: Engine, deployment: Deployment, arguments: Sequence[str]) -> str:
    """`arguments` are those of the engine's command, unquoted, without host and port."""
    is_own = engine.name == "headrace"
    ready, health = _PROBES.get(engine.name, ("/health", "/health"))
    image = IMAGES[engine.name] + ("" if is_own else engine.version)
    command = ""
    if engine.name == "sglang":  # its image has no command of its own
        command = f"          command: {json.dumps(engine.commands[0].split())}\n"
    listed = [*arguments, "--host", "0.0.0.0", "--port", str(_PORT)]
    return _TEMPLATE.format(
        name=engine.name,
        replicas=deployment.replicas,
        image=image,
        command=command,
        arguments=json.dumps(listed),
        environment=_OWN_ENVIRONMENT if is_own else "",
        port=_PORT,
        ready=ready,
        health=health,
        gpus=1 if is_own else deployment.gpus,
        folder="/models" if is_own else "/root/.cache/huggingface",
        pod=_OWN_POD if is_own else "",
        container=_OWN_CONTAINER if is_own else "",
        # GPUs of one replica exchange data through shared memory.
        scratch="tmp" if is_own else "shm",
        scratch_folder="/tmp" if is_own else "/dev/shm",
        medium="" if is_own else "medium: Memory",
    )
