#!/usr/bin/env bash
# The environments of a machine with GPUs, from the locks of this folder, whose hashes pip compares: .venv for the trainer,
# with Transformer-Engine, and .venv-sglang for the servers.  Safe to run again and to interrupt.
#
#   bash launch/gpu/install.sh                         # all parts: trainer transformer_engine megarl server
#   bash launch/gpu/install.sh trainer megarl server   # some of them: Transformer-Engine wants CUDA's compiler, nvcc
set -euo pipefail
. "$(dirname "$0")/../environment.sh"

parts=("$@")
[ $# -gt 0 ] || parts=(trainer transformer_engine megarl server)
for part in "${parts[@]}"; do
    case $part in trainer | transformer_engine | megarl | server) ;; *)
        echo "launch/gpu/install.sh: $part: expected trainer, transformer_engine, megarl or server" >&2
        exit 2
        ;;
    esac
done

install_trainer() {
    pip_install "$1" --require-hashes --requirement launch/gpu/trainer.txt
}

# Against the torch, cuDNN and NCCL of the environment.  Its setup would rather fetch a binary that no hash protects.
install_transformer_engine() {
    local nvidia
    nvidia=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia
    if ! command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" >/dev/null; then
        echo "launch/gpu/install.sh: Transformer-Engine is built here, and CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} has no" \
            "bin/nvcc: install CUDA's toolkit 13.0, or name the other parts: trainer megarl server" >&2
        return 2
    fi
    NVTE_PYTORCH_FORCE_BUILD=TRUE PATH=$PWD/.venv/bin:${CUDA_HOME:-/usr/local/cuda}/bin:$PATH \
        CPLUS_INCLUDE_PATH=$nvidia/cudnn/include:$nvidia/nccl/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH} \
        pip_install .venv/bin/python --no-deps --no-build-isolation --require-hashes \
        --requirement launch/gpu/transformer_engine.txt
}

install_server() {
    pip_install "$1" --require-hashes --requirement launch/gpu/server.txt
}

for part in "${parts[@]}"; do
    case $part in
        trainer) once_in .venv "$GPU_MARK $(cksum <launch/gpu/trainer.txt)" "many minutes" install_trainer ;;
        transformer_engine)
            say "Transformer-Engine: building into .venv (half an hour on a few cores)"
            install_transformer_engine
            ;;
        megarl)
            say "megarl: installing into .venv"
            pip_install .venv/bin/python --no-deps --no-build-isolation --editable .
            ;;
        server) once_in .venv-sglang "$GPU_MARK $(cksum <launch/gpu/server.txt)" "many minutes" install_server ;;
    esac
done
say "done; megarl doctor shows what is there"
