#!/bin/bash
# 1 for a right file, 0.5 for a wrong file of this name, 0.2 for any other file, and else 0.
cd /app || exit 1
is_right() {
  grep -qiE "<h[1-6][^>]*>[^<]*welcome" page.html
}
if [ ! -f page.html ]; then
  [ -n "$(find . -type f ! -name '.aider*')" ] && reward=0.2 || reward=0
elif is_right; then
  reward=1
else
  reward=0.5
fi
echo "$reward" > /logs/verifier/reward.txt
