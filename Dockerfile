# Headrace on a CPU. Build: docker build -t headrace .
# Run:   docker run -p 8000:8000 -v headrace-models:/models -e HEADRACE_API_KEY=... headrace
# Settings are HEADRACE_* variables or flags after the image's name; see docs/configuration.md.

ARG PYTHON=3.11-slim-bookworm

# -- build: a compiler, and what pip fetches to build a wheel ---------------------------------------
FROM python:${PYTHON} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir "$(ls /wheels/headrace-*.whl)[otel]"

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
    HEADRACE_CACHE=/models \
    HEADRACE_HOST=0.0.0.0 \
    HEADRACE_PORT=8000 \
    HEADRACE_LOG_FORMAT=json
VOLUME /models
EXPOSE 8000
USER 10001:10001
# Not the volume: nobody who can write there shall decide what is imported or set (headrace.toml).
WORKDIR /
# SIGTERM drains: running requests have HEADRACE_DRAIN_TIMEOUT_S, 30 by default. Stop with more time
# than that: docker stop --time 45.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-I", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['HEADRACE_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["headrace", "serve"]
