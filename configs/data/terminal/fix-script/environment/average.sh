#!/bin/bash
sum=0
count=1
while read -r number; do
  sum=$((sum + number))
  count=$((count + 1))
done < numbers.txt
echo $((sum / count))
