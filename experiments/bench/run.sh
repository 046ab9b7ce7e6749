#!/bin/sh
# All benchmarks of this folder, on an idle machine; about 45 minutes on 2 cores.
# Run from the repository's root: sh experiments/bench/run.sh
set -eu
out=experiments/bench

# Partial prefill against the stock model's own, by number of recomputed layers.
droidkv bench prefill --prefix-tokens 1000 --suffix-tokens 16 --json > "$out/prefill.json"
droidkv bench prefill --prefix-tokens 1000 --suffix-tokens 16 --layers 9 --layers 12 \
    --json > "$out/prefill-9-12.json"
# The same with the shortest suffix there is: nearly the prefix alone.
droidkv bench prefill --prefix-tokens 1000 --suffix-tokens 1 --json > "$out/prefill-suffix-1.json"

# The exact sweep against the naive loop: a long prefix, all 465 groups and the empty one.
droidkv bench sweep --prefix-tokens 1024 --suffix-tokens 8 --answer-tokens 4 \
    --json > "$out/sweep.json"

# The same against the paper's loop, which decodes an answer per group: an answer of 32 tokens.
droidkv bench sweep --prefix-tokens 512 --suffix-tokens 16 --answer-tokens 32 \
    --json > "$out/sweep-long-answer.json"

# Decoding with an identical cache: one fused pass against two, and against plain models.
droidkv bench icarus --json > "$out/icarus.json"

# This machine's coefficients, and how far predictions by them are off.
droidkv calibrate --output "$out/calibration.json"
