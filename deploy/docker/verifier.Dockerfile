# One verifier replica:  docker build -f deploy/docker/verifier.Dockerfile -t pipesd-verifier .
#
# For both architectures:  docker buildx build --platform linux/amd64,linux/arm64 -f … .
#
# The wheel of torch that pip takes on x86-64 brings CUDA along; for a CPU image give the index of
# the CPU builds:  --build-arg PIP_EXTRA_INDEX_URL=<address>
FROM python:3.12-slim-bookworm AS builder

ARG PIP_EXTRA_INDEX_URL=
RUN python -m venv /opt/pipesd
COPY pyproject.toml README.md LICENSE /src/
COPY constraints /src/constraints
COPY broker /src/broker
COPY cloud_verifier /src/cloud_verifier
RUN /opt/pipesd/bin/pip install --no-cache-dir --constraint /src/constraints/pins.txt "/src[cloud]"

FROM python:3.12-slim-bookworm
COPY --from=builder /opt/pipesd /opt/pipesd
# Targets that had to be converted (GGUF files) are kept here; mount something that lasts.
ENV PATH=/opt/pipesd/bin:$PATH PIPESD_CACHE_DIR=/cache HOME=/cache PYTHONUNBUFFERED=1
RUN mkdir /cache && chown 10001:10001 /cache
USER 10001:10001
ENTRYPOINT ["cloud-verifier"]
