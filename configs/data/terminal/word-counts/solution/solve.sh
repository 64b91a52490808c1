cat > count.py <<'END'
import collections
import sys

counts = collections.Counter(sys.stdin.read().lower().split())
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:3]:
    print(word, count)
END
