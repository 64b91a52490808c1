# Two images: docker build --target cpu -t longstride:cpu .     docker build --target cuda -t longstride:cuda .
# The repository lies in /opt/longstride, and runs are written to /opt/longstride/runs (a volume).
ARG BASE=docker.io/library/debian:12
FROM ${BASE} AS base
ARG DEBIAN_FRONTEND=noninteractive
# vLLM compiles kernels with g++ and Python's headers, and loads libnuma. bubblewrap runs programs of the policy.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends \
    bubblewrap ca-certificates g++ libnuma1 make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home longstride \
    && install -d -o longstride /opt/longstride /opt/longstride/runs
USER longstride
WORKDIR /opt/longstride
COPY --chown=longstride Makefile requirements-cpu.lock requirements-gpu.lock ./
COPY --chown=longstride tools/__init__.py tools/install.py tools/
COPY --chown=longstride common/__init__.py common/text.py common/

FROM base AS cpu
# A CPU build of torch needs PyTorch's own index.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make setup LOCK=requirements-cpu.lock
COPY --chown=longstride . .
VOLUME /opt/longstride/runs
ENTRYPOINT [".venv/bin/python", "run.py"]

FROM base AS cuda
# The driver comes from the host (NVIDIA Container Toolkit); the wheels contain the rest of CUDA.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN make setup LOCK=requirements-gpu.lock HAS_GPU=yes
COPY --chown=longstride . .
VOLUME /opt/longstride/runs
ENTRYPOINT [".venv/bin/python", "run.py"]
