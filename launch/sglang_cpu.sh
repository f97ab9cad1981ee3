#!/usr/bin/env bash
# Makes an environment with stock SGLang and the router smg for a machine without GPU: .venv-sglang, or .venv-sglang-VERSION.
# Nothing of it is patched; where SGLang imports GPU packages, megarl/servers/sglang_cpu/ stands in when it is started.
# Safe to run again and to interrupt.  Another version:  bash launch/sglang_cpu.sh 0.5.17
set -euo pipefail
. "$(dirname "$0")/environment.sh"

version=${1:-0.5.23}
pins=launch/sglang-$version.txt
if [ ! -f "$pins" ]; then
    echo "launch/sglang_cpu.sh: SGLang $version has no $pins; there are $(echo launch/sglang-*.txt)" >&2
    exit 2
fi
if [ "$version" = 0.5.23 ]; then folder=.venv-sglang; else folder=.venv-sglang-$version; fi

install_sglang() {
    # torch with what its build needs; the rest without, as SGLang declares GPU packages for every machine.
    echo "-- torch" &&
        pip_install "$1" --constraint "$pins" torch &&
        echo "-- SGLang $version, what it imports here, and smg" &&
        pip_install "$1" --no-deps --requirement "$pins"
}

once_in "$folder" "$(cksum <"$pins")" "about a minute" install_sglang
say "import check"
SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=megarl/servers/sglang_cpu PYTHONWARNINGS=ignore "$folder/bin/python" -c '
import importlib.metadata, sglang, sglang.srt.entrypoints.http_server, smg
print("SGLang", sglang.__version__, "with smg", importlib.metadata.version("smg"))'
say "done; now for example: megarl train recipe=quickstart rollout.engine=sglang"
