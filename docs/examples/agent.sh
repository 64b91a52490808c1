#!/bin/sh
# An agent in POSIX sh with curl and jq. Its context has the latest observation only.
set -eu
ask() { curl -fsS -H "Authorization: Bearer $OPENAI_API_KEY" "$@"; }
messages=$(ask "$LONGSTRIDE_ENV" | jq -c .messages)
while :; do
  said=$(ask "$OPENAI_BASE_URL/chat/completions" -d "{\"messages\": $messages}" |
    jq -r '.choices[0].message.content')
  result=$(jq -n --arg action "$said" '{$action}' | ask "$LONGSTRIDE_ENV/step" -d @-)
  [ "$(echo "$result" | jq '.done or .truncated')" = false ] || exit 0
  messages=$(echo "$result" | jq -c '[{role: "user", content: .observation}]')
done
