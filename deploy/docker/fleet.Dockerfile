# Exporter, tuner and live view:  docker build -f deploy/docker/fleet.Dockerfile -t pipesd-fleet .
#
# For both architectures:  docker buildx build --platform linux/amd64,linux/arm64 -f … .
#
# torch is here for one thing, the tuner's Gaussian process; on x86-64 give the index of the CPU
# builds, or pip brings CUDA along:  --build-arg PIP_EXTRA_INDEX_URL=<address>
# --build-arg TORCH= leaves it out: exporter and live view need none, and the tuner then samples in
# another way (docs/tuning.md).
FROM python:3.12-slim-bookworm AS builder

ARG PIP_EXTRA_INDEX_URL=
ARG TORCH=torch
RUN python -m venv /opt/pipesd
COPY pyproject.toml README.md LICENSE /src/
COPY constraints /src/constraints
COPY broker /src/broker
COPY cloud_verifier /src/cloud_verifier
RUN /opt/pipesd/bin/pip install --no-cache-dir --constraint /src/constraints/pins.txt \
    "/src[fleet]" "psycopg[binary]>=3.2,<4" $TORCH

FROM python:3.12-slim-bookworm
COPY --from=builder /opt/pipesd /opt/pipesd
ENV PATH=/opt/pipesd/bin:$PATH HOME=/var/lib/pipesd PYTHONUNBUFFERED=1
RUN mkdir /var/lib/pipesd && chown 10001:10001 /var/lib/pipesd
USER 10001:10001
ENTRYPOINT ["cloud-verifier"]
