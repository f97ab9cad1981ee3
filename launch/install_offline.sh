#!/usr/bin/env bash
# Installs megarl from a kit of launch/offline_kit.sh, on a machine without a package index:
#   bash launch/install_offline.sh FOLDER
# The environment .venv sees the packages of the Python that makes it (PYTHON=/path/to/python, else python3), and gets the
# kit's wheels; megarl itself is this checkout.
set -euo pipefail
cd "$(dirname "$0")/.."

kit=$(realpath "${1:?launch/install_offline.sh: expected the folder of a kit}")
python=${PYTHON:-python3}
wanted=$(sed -n 's/^python //p' "$kit/kit.txt")
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$wanted" != "$found" ]; then
    echo "launch/install_offline.sh: the kit is for Python $wanted, $python is $found; set PYTHON or make another kit" >&2
    exit 2
fi
"$python" -m venv --system-site-packages .venv
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# A Python that is itself in a virtual environment has its packages there, where --system-site-packages does not look.
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/machine.pth"
# With what is there already pip leaves alone whatever will do. --isolated: packages come from the kit alone.
.venv/bin/python -m pip install --isolated --quiet --no-index --find-links "$kit" --requirement "$kit/requirements.txt"
# Not pip's --editable, which needs setuptools in a version that the machine may not have.
echo "$PWD" >"$site/megarl.pth"
printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m megarl "$@"\n' "$PWD" >.venv/bin/megarl
chmod +x .venv/bin/megarl
.venv/bin/python launch/offline_kit.py --check "$kit/requirements.txt"
echo "ready: . .venv/bin/activate"
