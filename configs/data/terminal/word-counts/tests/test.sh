#!/bin/bash
cd /app || exit 1
# Programs of the agent run without access to the tests; other harnesses run them as they are.
run=${AS_AGENT:-env}
check() {
  found=$(printf '%s' "$1" | "$run" python3 count.py | xargs)
  [ "$found" = "$2" ] || { echo "expected $2, found $found"; exit 1; }
}
check "the cat and the dog and the bird" "the 3 and 2 bird 1"
check "B a A b c" "a 2 b 2 c 1"
check "one" "one 1"
check "" ""
