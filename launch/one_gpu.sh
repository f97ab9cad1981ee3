#!/usr/bin/env bash
# What this machine's GPU says: makes the environments, runs the tests that need CUDA, the ring with SGLang on the same
# GPU, and the benchmarks, whose pages go to benchmarks/results/.
# Safe to run again and to interrupt.  Further words are settings of the run:  bash launch/one_gpu.sh actor.optim.lr=5e-4
set -euo pipefail
. "$(dirname "$0")/environment.sh"

install_sglang() {
    pip_install "$1" "sglang==0.5.23"
}

if ! command -v nvidia-smi >/dev/null; then
    echo "launch/one_gpu.sh: no nvidia-smi, so there is no NVIDIA GPU that torch could use; want one" >&2
    exit 2
fi
make_environment
once_in .venv-sglang "sglang 0.5.23 for a GPU" "a few minutes" install_sglang
export MEGARL_SGLANG_PYTHON="$PWD/.venv-sglang/bin/python"

say "Transformer-Engine"
if ! python -c 'import transformer_engine.pytorch' 2>/dev/null; then
    # It is compiled for the torch that is here; without it Megatron's layers are ours.
    pip_install .venv/bin/python --no-build-isolation --constraint launch/constraints.txt --editable ".[gpu]" ||
        echo "it could not be installed; going on without it"
fi

say "tests: pytest -m gpu"
mkdir -p runs
python -m pytest -m gpu --junit-xml=runs/tests_gpu.xml

say "training: the quickstart on the GPU, with SGLang beside it"
megarl train recipe=quickstart trainer.device=cuda trainer.n_gpus_per_node=1 \
    actor.megatron.tensor_model_parallel_size=1 rollout.engine=sglang rollout.first_gpu=0 \
    rollout.placement=shared rollout.memory_fraction=0.3 trainer.experiment_name=one_gpu "$@"

say "benchmarks"
python benchmarks/bench_logprobs.py
say "done; runs/one_gpu, runs/tests_gpu.xml and benchmarks/results/ have the numbers"
