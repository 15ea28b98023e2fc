#!/usr/bin/env bash
# Builds the engine on a host without a package index, tests every instruction set the host has, and
# prints the benchmark's table. Needs torch, nanobind, scikit-build-core, cmake, ninja, pytest,
# hypothesis and pydantic there; PYTHONPATH may add what is missing. Well under ten minutes.
#
#   bench/run_cpu_on_host.sh [RESULTS.json]
#
# SKIP_TESTS=1 leaves the tests out; BENCH_ARGUMENTS are passed to `moe-offload bench cpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-cpu.json}
site=$(mktemp -d)

started=$SECONDS
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
  python3 -m pip install --quiet --no-build-isolation --no-deps --target "$site" .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
echo "built in $((SECONDS - started)) s"
python3 -c '
from vllm_moe_offload.engine import CpuExpertEngine
engine = CpuExpertEngine()
print("instruction sets:", *engine.isas_available)
print("threads:", engine.threads)'
lscpu | grep -E "Model name|^CPU\(s\)|Thread|L2|L3|NUMA"

# The table is wanted even when a test fails; the exit status tells.
status=0
if [[ -z ${SKIP_TESTS:-} ]]; then
  timeout 240 python3 -m pytest tests/engine -q -x -p no:cacheprovider || status=$?
fi
timeout 280 "$site/bin/moe-offload" bench cpu --json "$results" ${BENCH_ARGUMENTS:-}
exit $status
