# The image of servers, and of trainers that start servers themselves: the trainer's image, and SGLang from the locks in an
# environment of its own.  From the repository's root, after launch/docker/trainer.Dockerfile:
#
#   docker build --file launch/docker/server.Dockerfile --tag megarl-server:0.1.0 .
ARG TRAINER=megarl-trainer:0.1.0
FROM ${TRAINER}

USER root
WORKDIR /opt/megarl
COPY launch/gpu launch/gpu/
RUN bash launch/gpu/install.sh server
ENV MEGARL_SGLANG_PYTHON=/opt/megarl/.venv-sglang/bin/python

WORKDIR /workspace
USER megarl
CMD ["megarl", "doctor", "rollout.engine=sglang"]
