#!/usr/bin/env bash
# The first hour on a GPU: runs the parts of this folder, the most decisive first. README.md beside
# this says what each part decides.
#
#   ./session.sh            what has not been done yet, 25 minutes together
#   ./session.sh PART ...   these parts, done or not
#   ./session.sh --list     the parts
#   ./session.sh --quick    in a tenth of the time: whether everything runs, not whether it holds
#
# Everything lands in results/ (GRUYERE_SESSION_RESULTS): summary.txt, summary.json, and a folder a
# part with all of its output. Ends with 0 where nothing failed, 1 where something did, 2 where
# nothing can be run, 3 at corruption: nothing more is run then.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=${GRUYERE_SESSION_RESULTS:-$here/results}
parts=(
    probe canaries canaries-destroyed canaries-planted bench stress sanitizer
    torch-canaries torch-graphs torch-bench
)
# Seconds: a part's most (GRUYERE_SESSION_LIMIT lowers it), and all parts' together.
part_limit=${GRUYERE_SESSION_LIMIT:-480} all_limit=1500
quick=

declare -A limits=(
    [probe]=180 [canaries]=150 [canaries-destroyed]=150 [canaries-planted]=60
    [bench]=480 [stress]=240 [sanitizer]=180
    [torch-canaries]=300 [torch-graphs]=300 [torch-bench]=480
)
declare -A decides=(
    [probe]="the rules that the driver has, and what its calls cost"
    [canaries]="what is written into blocks is what is read, on streams that last"
    [canaries-destroyed]="the same while streams are destroyed"
    [canaries-planted]="whether the canaries would see a fault at all on this device"
    [bench]="seven traces of real programs through the library, on the real driver"
    [stress]="canaries of eight threads with most of the device taken"
    [sanitizer]="compute-sanitizer's opinion of the canaries"
    [torch-canaries]="canaries under torch, with graphs"
    [torch-graphs]="torch: the same losses, graphs, out of memory"
    [torch-bench]="torch: two programs under four allocators"
)
# What a failure asks for.
declare -A next=(
    [probe]="read probe/stderr for the case that did not end; the rules that were told stand"
    [canaries]="run ./session.sh canaries again with another GRUYERE_CANARIES='--seed N'; then \
report with the whole of results/"
    [canaries-destroyed]="if canaries passed, the fault is in what is done for destroyed streams: \
compare destroyed_stream.* of the probe"
    [canaries-planted]="read its stderr"
    [bench]="read bench/stderr; exit 4 is a trace that did not fit this device"
    [stress]="read stress/stderr; compare with canaries, which leave three quarters of the device \
free"
    [sanitizer]="read sanitizer/stdout: the first error names the address and the kernel"
    [torch-canaries]="its table says which canaries, and names the file of what they said; compare \
with canaries, which need no torch"
    [torch-graphs]="its table names the file of what the part said; graph rules of the driver are \
capture.* of the probe"
    [torch-bench]="its table names the program and the reason"
)

# A part that is interrupted has no outcome, and is run again.
running=
trap '[ -n "$running" ] && kill "$running" 2>/dev/null; exit 130' INT TERM HUP

die() {
    echo "session.sh: $1" >&2
    exit 2
}

# Why a part cannot be run here; nothing where it can.
missing() {
    case $1 in
    sanitizer)
        command -v compute-sanitizer >/dev/null || echo "compute-sanitizer is not installed"
        ;;
    torch-*)
        command -v python3 >/dev/null || { echo "no python3"; return; }
        python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1 ||
            echo "no torch with CUDA"
        ;;
    esac
}

acceptance() { # PARTS: of the acceptance program
    GRUYERE_LIBRARY="$here/libgruyere.so" python3 "$here/acceptance/acceptance.py" \
        ${quick:+--quick} --only "$1" --json "$folder/document.json"
}

canaries() { # SECONDS OPTIONS...: GRUYERE_CANARIES has more of them
    local seconds=${quick:+3}
    seconds=${seconds:-$1}
    shift
    # shellcheck disable=SC2086
    "$here/canaries" --library "$here/libgruyere.so" --seconds "$seconds" \
        --json "$folder/document.json" "$@" ${GRUYERE_CANARIES:-}
}

# One part, in this very shell's child: $folder is where its files go.
part() {
    case $1 in
    probe) "$here/probe" --json "$folder/document.json" ;;
    canaries) canaries 90 --threads 4 ;;
    canaries-destroyed) canaries 90 --threads 4 --destroy-streams ;;
    canaries-planted) canaries 15 --threads 4 --leave-out-record-stream ;;
    bench)
        local traces=()
        for trace in "$here"/traces/*.trace.zst; do
            # In a hurry, the smallest.
            [ -n "$quick" ] && [ "${trace##*/}" != fsdp.trace.zst ] && continue
            traces+=(--trace "$trace")
        done
        "$here/gruyere" bench --device cuda "${traces[@]}" --out "$folder" &&
            mv "$folder/bench.json" "$folder/document.json"
        ;;
    stress) canaries 120 --threads 8 --fill 0.85 ;;
    # The library asks for what a driver may refuse, to find out: such calls are no errors.
    sanitizer)
        compute-sanitizer --report-api-errors no --error-exitcode 1 \
            "$here/canaries" --library "$here/libgruyere.so" --seconds 20 --threads 2 \
            --json "$folder/document.json"
        ;;
    torch-canaries) acceptance b ;;
    torch-graphs) acceptance acd ;;
    torch-bench)
        # GRUYERE_BENCH_TORCH has more options: a rehearsal's is --stand-in.
        # shellcheck disable=SC2086
        PYTHONPATH="$here/python_loader" GRUYERE_LIBRARY="$here/libgruyere.so" "$here/gruyere" \
            bench --torch --python "$(command -v python3)" --program moe --program offload \
            --runs 1 ${quick:+--no-fit --steps 3} --json "$folder/document.json" \
            ${GRUYERE_BENCH_TORCH:-}
        ;;
    esac
}

# What the parts say of themselves in a line.
figure() {
    case $1 in
    probe) tail -n 5 "$results/$1/stderr" | grep ' rules: ' ;;
    bench) [ -s "$results/$1/stdout" ] && echo "the table is in bench/stdout" ;;
    torch-bench) [ -s "$results/$1/document.json" ] && echo "the table is in torch-bench/stdout" ;;
    # The first that failed, if one did.
    torch-*)
        grep ' FAILED ' "$results/$1/stdout" | tr -s ' ' | head -n 1 | grep . ||
            grep -c -E 'passed|books only' "$results/$1/stdout" |
                sed 's/$/ lines of the acceptance table/'
        ;;
    *) grep -E '^(ok|FAILED|CORRUPTION): ' "$results/$1/stdout" | tail -n 1 ;;
    esac 2>/dev/null
}

# The outcome of a part: a word, seconds, the exit code, a line.
finish() { # PART WORD SECONDS CODE LINE
    printf '%s\t%s\t%s\t%s\n' "$2" "$3" "$4" "$5" >"$results/$1/outcome.new"
    mv "$results/$1/outcome.new" "$results/$1/outcome"
    printf '%-10s %-20s %4s s  %s\n' "$2" "$1" "$3" "$5" >&2
}

run() { # PART LIMIT
    local name=$1 limit=$2 reason code began
    folder=$results/$name
    rm -rf "$folder"
    mkdir -p "$folder" ||
        die "$folder cannot be made: set GRUYERE_SESSION_RESULTS to a folder that can be written"
    reason=$(missing "$name")
    if [ -n "$reason" ]; then
        finish "$name" skipped 0 0 "$reason"
        return
    fi
    echo "--- $name, at most $limit s: ${decides[$name]}" >&2
    began=$SECONDS
    export here folder quick
    export -f part acceptance canaries
    # Killed with all that it has started; what sits in the driver after that is left behind.
    timeout --kill-after=10 "$limit" bash -c 'part "$1"' part "$name" \
        >"$folder/stdout" 2>"$folder/stderr" </dev/null &
    running=$!
    wait "$running"
    code=$?
    running=
    local took=$((SECONDS - began)) line word
    line=$(figure "$name")
    case $code in
    0) word=passed ;;
    3) word=CORRUPTION ;;
    124 | 137) word=FAILED line="took more than $limit s" ;;
    *) word=FAILED ;;
    esac
    if [ "$word" = FAILED ] && grep -rq 'were not what had been written' "$folder"; then
        word=CORRUPTION
    fi
    # The rule was broken on purpose: memory that is used after its free may be mapped no more.
    if [ "$name" = canaries-planted ] && [ "$word" = CORRUPTION ]; then
        word=passed line="the device faulted at the planted fault: it is seen"
    fi
    [ -n "$line" ] || line="exit code $code: $(grep -v '^$' "$folder/stderr" | tail -n 1)"
    [ "$word" = CORRUPTION ] && echo "$name" >"$results/CORRUPTION"
    finish "$name" "$word" "$took" "$code" "$line"
    # Without a driver every part would say the same.
    if [ "$name" = probe ] && [ "$code" = 2 ]; then
        sum_up
        die "there is no CUDA driver here: $(tail -n 1 "$folder/stderr")"
    fi
}

json_string() {
    printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

outcome_of() { # PART: sets word, took, code and line
    word='' took=0 code=0 line=''
    [ -f "$results/$1/outcome" ] && IFS=$'\t' read -r word took code line <"$results/$1/outcome"
    if [ -z "$word" ]; then
        word='not run'
        [ -f "$results/CORRUPTION" ] && line="corruption was found by $(cat "$results/CORRUPTION")"
    fi
}

sum_up() {
    local name word took code line failed=0 first=1
    {
        local how="${quick:+, in a hurry: whether everything runs, not whether it holds}"
        echo "Gruyère on a GPU, $(date -u +%FT%TZ)$how"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
        for name in "${parts[@]}"; do
            outcome_of "$name"
            printf '%-10s %-20s %4s s  %s\n' "$word" "$name" "$took" "$line"
        done
        for name in "${parts[@]}"; do
            outcome_of "$name"
            case $word in
            FAILED) echo "next, $name: ${next[$name]}" ;;
            CORRUPTION)
                echo "next, $name: do not use this build on this driver. ${next[$name]}." \
                    "To go on all the same: rm '$results/CORRUPTION'"
                ;;
            'not run') [ -f "$results/CORRUPTION" ] || echo "next, $name: ./session.sh $name" ;;
            esac
        done
        echo "All output: $results;" \
            "send summary.json with a report, and the folders of parts that failed."
    } >"$results/summary.txt"
    {
        printf '{"version": 1, "date": "%s", "machine": ' "$(date -u +%FT%TZ)"
        json_string "$(uname -srm)"
        printf ', "quick": %s, "corruption": %s, "parts": [' \
            "$([ -n "$quick" ] && echo true || echo false)" \
            "$([ -f "$results/CORRUPTION" ] && echo true || echo false)"
        for name in "${parts[@]}"; do
            outcome_of "$name"
            [ -n "$first" ] || printf ','
            first=
            printf '\n{"name": "%s", "outcome": "%s", "seconds": %s, "exit": %s, "line": ' \
                "$name" "$word" "$took" "$code"
            json_string "$line"
            printf ', "document": '
            # One that was cut short is none.
            if tail -c 2 "$results/$name/document.json" 2>/dev/null | grep -q '}'; then
                cat "$results/$name/document.json"
            else
                printf null
            fi
            printf '}'
        done
        printf '\n]}\n'
    } >"$results/summary.json"
    for name in "${parts[@]}"; do
        outcome_of "$name"
        case $word in FAILED) failed=1 ;; CORRUPTION) return 3 ;; esac
    done
    return $failed
}

spent() { # Seconds of all parts so far.
    local name word took code line sum=0
    for name in "${parts[@]}"; do
        outcome_of "$name"
        sum=$((sum + took))
    done
    echo "$sum"
}

wanted=()
for argument in "$@"; do
    case $argument in
    --list)
        for name in "${parts[@]}"; do
            printf '%-20s at most %3s s  %s\n' "$name" "${limits[$name]}" "${decides[$name]}"
        done
        exit 0
        ;;
    --quick) quick=1 ;;
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        [ -n "${decides[$argument]:-}" ] ||
            die "there is no part $argument; ./session.sh --list names them"
        wanted+=("$argument")
        ;;
    esac
done

mkdir -p "$results" ||
    die "$results cannot be made: set GRUYERE_SESSION_RESULTS to a folder that can be written"
for name in "${wanted[@]:-${parts[@]}}"; do
    if [ -f "$results/CORRUPTION" ]; then
        echo "corruption was found by $(cat "$results/CORRUPTION"): nothing more is run" \
            "(rm '$results/CORRUPTION' to go on all the same)" >&2
        break
    fi
    limit=${limits[$name]}
    if [ ${#wanted[@]} = 0 ]; then
        # What was done, or cannot be done here, is not done again.
        outcome_of "$name"
        [ "$word" = 'not run' ] || continue
        left=$((all_limit - $(spent)))
        if [ "$left" -lt 30 ]; then
            echo "25 minutes are spent: ./session.sh $name runs it by itself" >&2
            continue
        fi
        [ "$limit" -gt "$left" ] && limit=$left
    fi
    [ "$limit" -gt "$part_limit" ] && limit=$part_limit
    run "$name" "$limit"
done
sum_up
code=$?
cat "$results/summary.txt"
exit $code
