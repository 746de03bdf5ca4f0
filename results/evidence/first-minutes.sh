#!/usr/bin/env bash
# The first minutes on a GPU on which nothing has been measured, and the second ones; from the top of the repository:
#
#   OUT=first results/evidence/first-minutes.sh
#       whether steps are graphs and agree with the CPU, 60 seconds at most; whether runs repeat their bits, stacked and
#       in branches, 60; whether a run whose step cannot be a graph leaves the next one its graphs, 30; w1, w2 and w3 in
#       float32, tf32 and bf16, 90; then FedFM in tf32 until the time is over
#   OUT=second FROM=first BEFORE=/tmp/before PROBE=probe.py results/evidence/first-minutes.sh
#       kernels of w3 by time, 30 seconds; a script of kernels, PROBE, 240; the same bench of the code in the folder
#       BEFORE, another commit, and of this one, a minute each; then FedFM goes on
#
# The second one's BEFORE and PROBE may be left out; FROM says that it is the second.
# MINUTES are nine, and PRECISION is that of FedFM. TINY=1 tries all this on a CPU.
set -u
OUT=$(realpath -m "$OUT") PYTHON=${PYTHON:-python3}
export OUT
mkdir -p "$OUT"
workloads=("w1 w2" "w3 --epochs=1") backbones="cnn-small resnet18" device=cuda
profiled=w3
if [ -n "${TINY:-}" ]; then workloads=("w2 --epochs=1") backbones="cnn-small" device=cpu profiled=w2; fi
failing_run=test_on_a_cuda_device_a_run_that_cannot_be_captured_leaves_the_next_one_its_graphs

# Bench the code in a folder in the precisions that follow, until a second of this script, into a file of a name.
bench() {
    local folder=$1 name=$2 until=$3 precisions=("${@:4}")
    local precision workload left
    for workload in "${workloads[@]}"; do
        for precision in "${precisions[@]}"; do
            left=$((until - SECONDS))
            if [ "$left" -gt 0 ]; then
                # shellcheck disable=SC2086  # a workload has options
                (cd "$folder" && PYTHONPATH=$PWD timeout --kill-after=5 "$left" "$PYTHON" -m fedcli bench $workload \
                    --repeats=1 --precision="$precision" --csv="$OUT/$name.csv")
            fi
        done
    done
}

# Hold graphs of steps, and the laws, to the CPU until a second of this script.
check_steps() {
    local until=$1 left
    PYTHONPATH=$PWD timeout --kill-after=5 "$until" "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_graphs.py \
        -k "on_a_cuda_device and not $failing_run"
    left=$((until - SECONDS))
    if [ "$left" -gt 0 ]; then
        PYTHONPATH=$PWD timeout --kill-after=5 "$left" "$PYTHON" -m fedcli check fedavg fedfm scaffold \
            ${TINY:+--law=9} --device "$device"
    fi
}

# Run two rounds twice in each way, of a small network and of ResNet-18, until a second of this script; `verify` compares
# the bits.
check_bits() {
    local until=$1
    local backbone way left folder
    for backbone in $backbones; do
        for way in 10 branches:10; do
            folder="$OUT/bits-$backbone-${way%:*}"
            left=$((until - SECONDS))
            if [ "$left" -gt 0 ]; then
                PYTHONPATH=$PWD timeout --kill-after=5 "$left" bash -c '"$0" -m fedcli run fedavg --dataset digits \
                    --backbone "$1" --clients-per-chunk "$2" --rounds 2 --device "$3" --out "$4" &&
                    "$0" -m fedcli verify "$4"' "$PYTHON" "$backbone" "$way" "$device" "$folder"
            fi
        done
    done
}

# A loss that reads a number cannot be a graph; another run follows in the same process. At most so many seconds.
check_failing_run() {
    local seconds=$1
    PYTHONPATH=$PWD timeout --kill-after=5 "$seconds" "$PYTHON" -m pytest -q -p no:cacheprovider \
        "tests/test_graphs.py::$failing_run"
}

# Where the package is not installed, its papers have to stand in it.
for tree in "$PWD" ${BEFORE:+"$BEFORE"}; do
    (cd "$tree" && { PYTHONPATH=$PWD "$PYTHON" -c "import fedcli.papers" 2>/dev/null || ln -sn ../papers fedcli/papers; })
done
if [ -z "${FROM:-}" ]; then
    check_steps 60
    check_bits $((SECONDS + 60))
    check_failing_run 30
    bench . bench $((SECONDS + 90)) float32 tf32 bf16
else
    PYTHONPATH=$PWD timeout --kill-after=5 30 "$PYTHON" results/evidence/kernels.py "$profiled" \
        --precision="${PRECISION:-tf32}" --device="$device" --out="$OUT/kernels.txt"
    # shellcheck disable=SC2086  # so that the script may have options
    if [ -n "${PROBE:-}" ]; then timeout --kill-after=5 260 "$PYTHON" $PROBE --budget 240; fi
    if [ -n "${BEFORE:-}" ]; then
        start=$SECONDS
        bench "$BEFORE" before $((start + 60)) float32
        bench . after $((start + 120)) float32
    fi
fi
left=$((60 * ${MINUTES:-9} - SECONDS))
if [ "$left" -gt 0 ]; then
    PYTHONPATH=$PWD "$PYTHON" results/evidence/evidence.py ${TINY:+--tiny} --time=$left --jobs=1 \
        --precision="${PRECISION:-tf32}" --carry="$OUT" ${FROM:+--from="$FROM"}
fi
