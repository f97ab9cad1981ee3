# The image of servers, and of trainers that start servers themselves: the trainer's image, and SGLang from the locks in an
# environment of its own.  launch/docker/build.sh builds it.
ARG TRAINER
FROM ${TRAINER}

USER root
# With CUDA's compiler, as SGLang compiles kernels when it starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        cuda-nvcc-13-0 cuda-cudart-dev-13-0 libcublas-dev-13-0 libcurand-dev-13-0 \
    && rm -rf /var/lib/apt/lists/*
ENV CUDA_HOME=/usr/local/cuda
WORKDIR /opt/megarl
COPY launch/environment.sh launch/
COPY launch/gpu launch/gpu/
RUN PYTHON=/usr/bin/python3.12 PIP_NO_CACHE_DIR=1 bash launch/gpu/install.sh server
ENV MEGARL_SGLANG_PYTHON=/opt/megarl/.venv-sglang/bin/python

LABEL org.opencontainers.image.title=megarl-server
WORKDIR /workspace
USER megarl
CMD ["megarl", "doctor", "rollout.engine=sglang"]
