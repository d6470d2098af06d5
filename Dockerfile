# Headrace on a CPU. Build: docker build -t headrace .
# Run:   docker run -p 8000:8000 -v headrace-models:/models -e HEADRACE_API_KEY=... headrace
# Settings are HEADRACE_* variables or flags after the image's name; see docs/configuration.md.

# A tag, which can come to mean another image: to pin that too, give a digest,
# --build-arg PYTHON=3.11-slim-bookworm@sha256:... Packages are pinned by their hashes.
ARG PYTHON=3.11-slim-bookworm

# -- build: a compiler, and what builds a wheel; all that pip fetches is in a lock file ---------------------------------------
FROM python:${PYTHON} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY deploy/requirements.lock deploy/build-requirements.lock ./
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --only-binary=:all: \
       -r build-requirements.lock
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir --require-hashes --only-binary=:all: \
       -r requirements.lock
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src ./src
RUN PATH=/opt/build/bin:$PATH pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation \
       --wheel-dir /wheels . \
    && /opt/headrace/bin/pip install --no-cache-dir --no-index --no-deps /wheels/headrace-*.whl \
    && /opt/headrace/bin/pip check

# -- what runs: no compiler, no sources, no root -----------------------------------------------------
FROM python:${PYTHON}
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin headrace \
    && mkdir /models \
    && chown 10001:10001 /models
COPY --from=build /opt/headrace /opt/headrace
# Inside a container every address but its own is outside: publish the port only where it may be
# reached, and set a key (HEADRACE_API_KEY, or HEADRACE_API_KEYS_FILE with a mounted secret).
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    HEADRACE_CACHE=/models \
    HEADRACE_HOST=0.0.0.0 \
    HEADRACE_PORT=8000 \
    HEADRACE_LOG_FORMAT=json
VOLUME /models
EXPOSE 8000
USER 10001:10001
# Not the volume: nothing that lies there may be taken for code, or for settings.
WORKDIR /
# SIGTERM drains: running requests have HEADRACE_DRAIN_TIMEOUT_S, 30 by default. Stop with more time
# than that: docker stop --time 45.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-I", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['HEADRACE_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["headrace", "serve"]
