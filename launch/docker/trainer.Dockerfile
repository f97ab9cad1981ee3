# The image of a trainer without servers of its own: the trainer's environment from the locks, with megarl in it.
# launch/docker/build.sh builds it.  For x86-64 alone, as the locks are.
FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04@sha256:0230b7f243483cb15969fa3cc724a9459599604427052fc2a0d4291c7c0647dd AS build

RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git python3.12 python3.12-dev python3.12-venv
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
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 .venv/bin/python -m pip install --no-deps --no-build-isolation /tmp/apex; \
    fi

COPY setup.py README.md LICENSE ./
COPY configs configs/
COPY megarl megarl/
COPY megarl_sandbox megarl_sandbox/
RUN .venv/bin/python -m pip install --no-deps --no-build-isolation --no-index .

# CUDA's libraries are those that torch brings; what Triton compiles when it runs wants a compiler and Python's headers.
FROM nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates openssl g++ python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers libibverbs1 librdmacm1t64 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 megarl \
    && install --directory --owner megarl /workspace
COPY --from=build /opt/megarl/.venv /opt/megarl/.venv/
ENV PATH=/opt/megarl/.venv/bin:$PATH

ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title=megarl-trainer \
    org.opencontainers.image.version=$VERSION \
    org.opencontainers.image.revision=$REVISION \
    org.opencontainers.image.licenses=Apache-2.0
WORKDIR /workspace
USER megarl
CMD ["megarl", "doctor"]
