#!/usr/bin/env bash
# On a machine with GPUs, what CI cannot run: the GPU's tests, the soaks, and the figures of
# docs/benchmarks.md. Needs vLLM's CUDA build, pytest, hypothesis and what builds the package
# (scikit-build-core, nanobind, cmake, ninja), no package index.
#
#   tools/gpu_host.sh OUT SECONDS SET...
#
#   tools/gpu_host.sh out 1800 tests              ends with a line a job; status 1 if one failed
#   tools/gpu_host.sh out 560 soaks
#   tools/gpu_host.sh out 560 decode pingpong
#   ONLY='stream|delays' tools/gpu_host.sh out 560 tests
#
# Sets: tests, soaks, both (soaks, and tests beside them: AT_ONCE more than the three), alone (tests
# that count the whole GPU's memory or measure its bus, and memcheck); engine_tests, kernels, scaling,
# kt (the CPU engine, kt-kernel on the path); decode, modes, pingpong, prefill, fp8, resident, serve,
# load; together (sets of these that TOGETHER names, by default fp8 and modes: all their
# engines start at once, on the GPUs in turn, and then one measures after another; serve may be one).
#
# Rows and logs go to OUT. The package is built first where it is not there, into build/site. Tests
# and soaks are processes of their own (a failed one may leave its GPU context broken), AT_ONCE of
# them (4 a GPU), each on one GPU and an equal share of the CPUs, two at least. Figures are measured
# one after another, nothing beside them; of sets that start together, resident needs a GPU that no
# other has (on two GPUs: TOGETHER="fp8 resident modes"). What has not ended after SECONDS is stopped.
#
# ONLY: a pattern of the names of tests and soaks. COMMIT, CARD: what rows call code and machine.
# DEVICES: the GPUs that tests and soaks use ("1", "0 1"; all of them). They use the CPUs that this
# script may (taskset), so that two of it can run beside each other.
# TOUCH: GiB of memory to touch during the build, by all CPUs: a virtual machine may get its memory
# only then, and engines that touch it by themselves start slowly.

set -uo pipefail
cd "$(dirname "$0")/.."
if (($# < 3)); then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ENDS=$(($(date +%s) + $2))
OUT=$(realpath -m "$1")
shift 2
COMMIT=${COMMIT:-$(git rev-parse --short HEAD)}
CARD=${CARD:-$(nvidia-smi --query-gpu=name --format=csv,noheader | awk 'NR == 1 { print tolower($NF) }')}
GPUS=$(nvidia-smi --list-gpus | wc -l)
DEVICES=${DEVICES:-$(seq -s ' ' 0 $((GPUS - 1)))}
CPUS=$(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)))')
AT_ONCE=${AT_ONCE:-$((4 * $(wc -w <<< "$DEVICES")))}
SETS=" tests soaks both alone engine_tests kernels scaling kt decode modes pingpong prefill fp8 resident serve load together "
for set in "$@"; do
  if [[ $SETS != *" $set "* ]]; then
    echo "$set: no such set; there are:$SETS" >&2
    exit 2
  fi
  if [[ $set == both ]] && ((AT_ONCE <= 3)); then
    echo "both: AT_ONCE is $AT_ONCE and three soaks run all the time: give more, or soaks and tests apart" >&2
    exit 2
  fi
done
read -ra TOGETHER <<< "${TOGETHER:-fp8 modes}"
for set in "${TOGETHER[@]}"; do
  if [[ " decode modes pingpong prefill fp8 resident serve " != *" $set "* ]]; then
    echo "TOGETHER: $set: give some of decode, modes, pingpong, prefill, fp8, resident and serve" >&2
    exit 2
  fi
done
mkdir -p "$OUT"

build() {
  local sources
  sources=$(find csrc CMakeLists.txt pyproject.toml -type f -print0 | sort -z | xargs -0 cat | sha256sum)
  sources=build/site/sources-${sources:0:16}
  if [[ ! -e $sources ]]; then
    rm -rf build/site
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
      python3 -m pip install --quiet --no-build-isolation --no-deps --target build/site . || exit 1
    touch "$sources"
    echo "built in $SECONDS s"
  fi
  # Put there whole: a run that is still going on may have the file that was there mapped.
  local module=(build/site/vllm_moe_offload/engine/_engine*.so)
  cp "${module[0]}" "src/vllm_moe_offload/engine/new-$BASHPID"
  mv "src/vllm_moe_offload/engine/new-$BASHPID" "src/vllm_moe_offload/engine/${module[0]##*/}"
  # The sources as they are now; of what was installed, that it is a plugin of vLLM.
  export PYTHONPATH="$PWD/src:$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}"
}

# Every page of TOUCH GiB, written once and given back.
touch_memory() {
  python3 - "${TOUCH:-0}" << 'PYTHON'
import mmap, os, sys, time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

began, gib = time.monotonic(), int(sys.argv[1])
block = np.frombuffer(mmap.mmap(-1, max(gib, 1) << 30, flags=mmap.MAP_PRIVATE), np.uint8)
with ThreadPoolExecutor(os.cpu_count()) as pool:  # filling leaves Python's lock
    list(pool.map(lambda i: block[i << 28 : (i + 1) << 28].fill(1), range(4 * gib)))
if gib:
    print(f"touched {gib} GiB in {time.monotonic() - began:.0f} s")
PYTHON
}

left() { echo $((ENDS - $(date +%s) - ${1:-0})); }

# Tests and soaks: a line of a name and a command each, the longest first.

# Checkpoints of tests that have passed are removed: together they are more than 64 GB.
PYTEST="python3 -m pytest -m gpu -s -ra -p no:cacheprovider --tb=short --show-capture=no --durations=8"
PYTEST+=" -o tmp_path_retention_policy=failed"
KINDS="bf16 fp8_block fp8_tensor fp8_channel"

soaks() {
  local minutes
  minutes=$(awk "BEGIN { print ($(left 80)) / 60 }") # less what an engine takes to start and end
  echo "soak-captured python3 -m tests.gpu.soak --captured --mode auto --every 50 --minutes $minutes"
  echo "soak-eager python3 -m tests.gpu.soak --kinds bf16 fp8_block --minutes $minutes"
  echo "soak-engine python3 -m tests.soak.engine --minutes $minutes"
}

tests() {
  local name runner
  local runs="not late and not noticed and not attention"
  echo "pingpong $PYTEST tests/gpu/test_pingpong.py -k 'not too_early and not by_hand'"
  echo "captured-split $PYTEST tests/gpu/test_captured.py -k 'cpu or hybrid or auto'"
  echo "captured $PYTEST tests/gpu/test_captured.py -k 'not (cpu or hybrid or auto)'"
  for name in lanes device; do
    echo "$name $PYTEST tests/$name"
  done
  echo "prefetch-late $PYTEST tests/gpu/test_prefetch.py -k 'late or noticed'"
  echo "prefetch-attention $PYTEST tests/gpu/test_prefetch.py -k attention"
  echo "prefetch-runners $PYTEST tests/gpu/test_prefetch.py -k '$runs and not dense'"
  echo "prefetch-dense $PYTEST tests/gpu/test_prefetch.py -k '$runs and dense'"
  echo "pingpong-late $PYTEST tests/gpu/test_pingpong.py -k 'too_early or by_hand'"
  for name in qwen3_moe mixtral deepseek_v2 olmoe demo; do
    echo "architectures-$name $PYTEST tests/gpu/test_architectures.py -k $name"
  done
  for name in $KINDS; do
    echo "stream-$name $PYTEST tests/gpu/test_stream.py -k 'further and $name'"
    echo "stream-layers-$name $PYTEST tests/gpu/test_stream.py -k 'not further and $name'"
  done
  for name in layer watchdog; do
    echo "$name $PYTEST tests/gpu/test_$name.py"
  done
  for name in $KINDS; do
    for runner in 0 1; do
      echo "sameness-$name-v$((runner + 1)) VLLM_USE_V2_MODEL_RUNNER=$runner" \
        "$PYTEST tests/gpu/test_sameness.py -k $name"
    done
  done
  for name in server delays; do
    echo "$name $PYTEST tests/gpu/test_$name.py"
  done
}

both() {
  soaks
  tests
}

alone() {
  local runner
  for runner in 0 1; do
    echo "sizes-v$((runner + 1)) VLLM_USE_V2_MODEL_RUNNER=$runner $PYTEST tests/gpu/test_sizes.py"
  done
  echo "correction $PYTEST tests/gpu/test_correction.py"
  # Of calls that fail only the program hears, as ever: cuda.bindings asks the driver for all that a
  # newer one has.
  for name in "layer.py -k 'bf16 and order'" "captured.py -k 'decoding and hybrid and captured'"; do
    echo "memcheck-${name%%.*} compute-sanitizer --tool memcheck --report-api-errors no" \
      "--error-exitcode 9 $PYTEST tests/gpu/test_$name"
  done
}

# One such line; SLOT is which of the processes it is that run at once.
job() {
  local name=${1%% *} word status=0 began=$SECONDS seconds
  read -ra devices <<< "$DEVICES"
  read -ra cpus <<< "$CPUS"
  local share=$((${#cpus[@]} / AT_ONCE))
  # Threads that wait for each other crawl on one CPU: rather two that others use too.
  ((share > 1)) || share=$((${#cpus[@]} > 1 ? 2 : 1))
  local mine=${cpus[*]:SLOT * share % ${#cpus[@]}:share}
  seconds=$(left 10)
  if ((seconds < 30)); then
    echo "NOT STARTED $name"
    return 1
  fi
  {
    eval "CUDA_VISIBLE_DEVICES=${devices[SLOT % ${#devices[@]}]} timeout --signal=INT" \
      "--kill-after=8 $seconds taskset --cpu-list ${mine// /,} env ${1#* }" || status=$?
  } > "$OUT/$name.log" 2>&1
  case $status in
    0) word=ok ;;
    124 | 137) word=STOPPED ;;
    *) word=FAILED ;;
  esac
  printf '%s %s, %d s: %s\n' $word "$name" $((SECONDS - began)) "$(grep -aE \
    "[0-9] (passed|failed|skipped|error)|float64|[0-9]+ calls" "$OUT/$name.log" | tail -1 | cut -c1-250)"
  grep -aE "^(FAILED|ERROR) " "$OUT/$name.log" | cut -c1-250
  return $((status != 0))
}

# The lines of standard input, so many at once.
at_once() {
  if ((GPUS == 0)); then
    echo "tests and soaks need a GPU, and nvidia-smi lists none" >&2
    return 1
  fi
  export -f job left
  export ENDS OUT DEVICES CPUS
  grep -E "^[^ ]*(${ONLY:-.*})[^ ]* " |
    AT_ONCE=$1 xargs --delimiter '\n' --max-procs "$1" --process-slot-var=SLOT -I{} bash -c 'job "$1"' _ {}
}

# Figures.

# A benchmark of engines, its file in OUT and its options.
engines() {
  local name=$1 file=$2
  shift 2
  timeout --signal=TERM --kill-after=10 "$(left 5)" python3 -m "bench.$name" "$@" --seconds 4 \
    ${TURNS:+--turns "$OUT/turns-$ENDS" --runs "$TURNS" --kv-gib 2} \
    --json "$OUT/$file.json" --logs "$OUT/logs-$file" --deadline "$(left 12)" --commit "$COMMIT"
}

decode() {
  engines decode decode-peers --contestants auto,vllm-uva,vllm-gpu --together 3 \
    --batches 1,8,32 --routing uniform,local --tokens 512,4096,8192
}
modes() { # three engines that keep their experts in host memory: 90 GiB of it
  engines decode decode-modes --contestants auto,cache,cpu --together 3 \
    --batches 1,8,32 --routing uniform,local,switching
}
pingpong() { # every expert copied in every step, by both through two buffers of a layer
  engines decode pingpong --contestants vllm-prefetch,stream --together 2 --slots 1 \
    --batches 1 --routing uniform --tokens 512
}
prefill() {
  engines prefill prefill --contestants auto,vllm-prefetch,vllm-gpu --together 3 \
    --tokens 512,2048,4096,8192,32768
}
fp8() {
  engines decode decode-fp8 --format fp8-block --contestants auto,vllm-gpu --together 2 \
    --batches 1,8,32 --routing uniform,local
}
resident() {
  engines decode decode-resident --slots 128 --contestants auto,vllm-gpu --together 2 \
    --batches 1,8,32 --routing uniform
}
together() {
  ((GPUS)) || { echo "together: engines need a GPU, and nvidia-smi lists none" >&2; return 1; }
  local gpu=0 set cpus=$(($(nproc) / GPUS)) started=() process status=0
  for set in "${TOGETHER[@]}"; do
    (
      taskset --cpu-list --pid "$((gpu * cpus))-$((gpu * cpus + cpus - 1))" "$BASHPID" > /dev/null
      export CUDA_VISIBLE_DEVICES=$gpu
      TURNS=${#TOGETHER[@]} $set
    ) &
    started+=($!)
    gpu=$(((gpu + 1) % GPUS))
  done
  for process in "${started[@]}"; do
    wait "$process" || status=1
  done
  return $status
}
serve() { engines serve serve --contestants auto; }
load() { engines load load --layers 4 --load-format auto --contestants cache,vllm-gpu; }

# A benchmark of the CPU engine: its file in OUT and its command.
engine() {
  local file=$1
  shift
  timeout --kill-after=10 "$(left 5)" "$@" --json "$OUT/$file.json" --card "$CARD" --commit "$COMMIT"
}

engine_tests() { timeout "$(left 5)" python3 -m pytest -q -p no:cacheprovider tests/engine; }
kernels() { engine cpu build/site/bin/moe-offload bench cpu; }
scaling() {
  engine cpu-scaling build/site/bin/moe-offload bench cpu --shapes 2048x768 --formats bf16,int4 \
    --rows 1,64 --threads 1,2,4,8,16 --gib 2 --no-torch
}
kt() { engine kt python3 -m bench.kt; }

touch_memory &
build
wait
failed=0
for set in "$@"; do
  case $set in
    tests | soaks | both) $set | at_once "$AT_ONCE" || failed=1 ;;
    alone) $set | at_once 1 || failed=1 ;;
    *)
      if (($(left) < 60)); then
        echo "NOT STARTED $set"
        failed=1
        continue
      fi
      echo "$set, after $SECONDS s"
      $set || failed=1
      ;;
  esac
done
exit $failed
