# The trainer with Megatron-Core, for GPU nodes or (with the default base) for a CPU.
# Not verified on a GPU: choose a base image that brings CUDA and torch, set TORCH to what it has, and EXTRAS=train,gpu
# where it has no Transformer Engine.
#   docker build -t gppo-megatron .
#   docker run --rm gppo-megatron launch launchers/recipes/demo.yaml
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

ARG TORCH=torch==2.13.0
ARG EXTRAS=train
# pycosat, of reasoning-gym, comes as source alone.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/gppo_megatron
COPY pyproject.toml README.md LICENSE ./
COPY gppo_megatron gppo_megatron
COPY launchers launchers
COPY checkpoints_tools checkpoints_tools
COPY verifiers verifiers
RUN python -m pip install --no-cache-dir "${TORCH}" && python -m pip install --no-cache-dir ".[${EXTRAS}]"

ENTRYPOINT ["gppo"]
CMD ["--help"]
