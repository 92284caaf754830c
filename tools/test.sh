#!/usr/bin/env bash
# Runs every test: those of one process two at a time, then those that start vLLM or Ray one after another, since each
# of these takes every core. Options go to pytest.
#
#   tools/test.sh [-k NAME ...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
tests() {
    .venv/bin/python -m pytest "$@"
    local status=$?
    [[ $status -eq 0 || $status -eq 5 ]] || failed=$status # 5: no test of this kind was chosen
}

tests -n 2 --dist loadfile -m "not engine and not cluster" "$@"
tests -m "engine or cluster" "$@"
exit "$failed"
