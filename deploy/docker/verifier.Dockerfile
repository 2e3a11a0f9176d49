# One verifier replica:  docker build -f deploy/docker/verifier.Dockerfile -t pipesd-verifier .
#
# The wheel of torch that pip takes on x86-64 brings CUDA along; for a CPU image give the index of
# the CPU builds:  --build-arg PIP_EXTRA_INDEX_URL=<address>
FROM python:3.12-slim

ARG PIP_EXTRA_INDEX_URL=
COPY . /src
RUN pip install --no-cache-dir "/src[cloud]" && rm -rf /src

# Targets that had to be converted (GGUF files) are kept here; mount something that lasts.
ENV PIPESD_CACHE_DIR=/cache HOME=/cache
RUN mkdir /cache && chown 10001:10001 /cache
USER 10001:10001
ENTRYPOINT ["cloud-verifier"]
