#!/bin/bash
cd /app || exit 1
# Programs of the agent run without access to the tests; other harnesses run them as they are.
run=${AS_AGENT:-env}
check() {
  folder=$(mktemp -d)
  "$run" cp average.sh "$folder/" || exit 1
  printf '%s\n' $2 > "$folder/numbers.txt"
  found=$(cd "$folder" && "$run" bash average.sh)
  [ "$found" = "$1" ] || { echo "the average of $2 is $1, not $found"; exit 1; }
}
check 12 "12 7 30 3 8"
check 4 "4"
check 50 "100 1"
