# The image of a trainer without servers of its own: CUDA, the trainer's environment from the locks, megarl and its checks.
# From the repository's root:
#
#   docker build --file launch/docker/trainer.Dockerfile --tag megarl-trainer:0.1.0 .
#   docker build ... --build-arg APEX_COMMIT=HASH .      # with Apex of a commit of NVIDIA's, which nothing requires
FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git openssl python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers libibverbs1 librdmacm1t64 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 megarl \
    && install --directory --owner megarl /workspace
ENV CUDA_HOME=/usr/local/cuda \
    PIP_NO_CACHE_DIR=1 \
    PYTHON=/usr/bin/python3.12

# Packages before code: a change of the code leaves their layers as they are.
WORKDIR /opt/megarl
COPY launch/environment.sh launch/
COPY launch/gpu launch/gpu/
RUN bash launch/gpu/install.sh trainer
RUN bash launch/gpu/install.sh transformer_engine

# Not the package of that name on the package index, which is another program.
ARG APEX_COMMIT=
RUN if [ -n "$APEX_COMMIT" ]; then \
        git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_COMMIT" \
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 .venv/bin/python -m pip install --no-deps --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

COPY setup.py README.md LICENSE .pytest.ini ./
COPY configs configs/
COPY megarl megarl/
COPY megarl_sandbox megarl_sandbox/
COPY launch launch/
COPY tests tests/
COPY benchmarks benchmarks/
RUN bash launch/gpu/install.sh megarl
# The checks of launch/one_gpu.sh and launch/eight_gpus.sh leave their pages there.
RUN install --directory --owner megarl runs

ENV PATH=/opt/megarl/.venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace
USER megarl
CMD ["megarl", "doctor"]
