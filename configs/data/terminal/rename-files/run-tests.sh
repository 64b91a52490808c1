#!/bin/bash
cd /app/photos || exit 1
expected="img_0001.jpg img_0007.jpg img_0012.jpg img_0130.jpg read_me_first.txt"
[ "$(ls | LC_ALL=C sort | xargs)" = "$expected" ] || { ls; exit 1; }
for number in 0001 0007 0012 0130; do
  [ "$(cat img_$number.jpg)" = "photo $number" ] || exit 1
done
[ "$(cat read_me_first.txt)" = "a note" ]
