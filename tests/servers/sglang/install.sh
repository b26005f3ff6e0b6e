#!/usr/bin/env bash
# Build an environment at $1 in which the real SGLang server runs on a CPU: PyPI's wheel, its own torch-native
# attention, and a stand-in for the CUDA kernels it imports but does not call here. About 3 GB. PYTHON: 3.11.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
venv="$1"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"; }
pip "${TORCH:-torch==2.13.0}"  # first and alone: a later package must not bring another build of it
"$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' > "$venv/torch"
pip --no-deps sglang==0.5.23 torchvision==0.28.0
pip -r "$here/requirements.txt"
"$venv/bin/python" "$here/repair_torchvision.py"
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
cp -r "$here/stubs/sgl_kernel" "$site/"
"$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' | diff "$venv/torch" -
touch "$venv/.ready"
