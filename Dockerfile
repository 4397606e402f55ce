# The project with the packages of constraints.txt, as scripts/setup.sh installs them. Unverified: see README.md.
#   docker build -t areal_like .                       CPU
#   docker build -t areal_like:cuda --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04 --build-arg TORCH_INDEX= .
ARG BASE=ubuntu:24.04
FROM ${BASE}
# For the CPU torch comes from its own index; empty: from PyPI, where it brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# An extra of pyproject.toml, e.g. verifiers.
ARG EXTRA=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /areal_like
COPY . .
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 bash scripts/setup.sh /opt/areal_like ${EXTRA:+"${EXTRA}"} \
    && rm -rf /root/.cache
ENV PATH=/opt/areal_like/bin:${PATH}
ENTRYPOINT ["areal-like"]
CMD ["train", "quickstart"]
