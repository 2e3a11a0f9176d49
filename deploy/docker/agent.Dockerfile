# An edge device:  docker build -f deploy/docker/agent.Dockerfile -t pipesd-agent .
#
# For both architectures:  docker buildx build --platform linux/amd64,linux/arm64 -f … .
#
# llama.cpp is compiled in the first stage, without -march=native: the machine that builds is not
# the one that runs. On x86-64 that still takes AVX2. On arm64 it is plain armv8-a, which every
# board runs; a Raspberry Pi 5 or a Jetson Orin multiplies quantised weights faster with
#   --build-arg LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod"
FROM python:3.12-slim-bookworm AS builder

ARG LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pipesd
COPY constraints /src/constraints
COPY scripts /src/scripts
RUN CMAKE_ARGS="$LLAMA_CMAKE_ARGS" /src/scripts/llama-wheel.sh /opt/pipesd/bin/python /wheels
COPY pyproject.toml README.md LICENSE /src/
COPY broker /src/broker
COPY edge_agent /src/edge_agent
RUN /opt/pipesd/bin/pip install --no-cache-dir --find-links /wheels \
    --constraint /src/constraints/pins.txt "/src[edge]"

FROM python:3.12-slim-bookworm
# The C++ and OpenMP runtimes of llama.cpp.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=builder /opt/pipesd /opt/pipesd
# Drafts that were prepared, and what the agent remembers; mount something that lasts.
ENV PATH=/opt/pipesd/bin:$PATH PIPESD_CACHE_DIR=/data/cache HOME=/data PYTHONUNBUFFERED=1
RUN mkdir -p /data && chown 10001:10001 /data
USER 10001:10001
ENTRYPOINT ["edge-agent"]
