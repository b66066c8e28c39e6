#!/bin/sh
# Two files, half of the reward each.
score() { [ "$(sh /app/count.sh "$1" 2> /dev/null)" = "$2" ] && echo 0.5 || echo 0; }
printf 'no\nnone\n' > /tmp/none.txt
first=$(score /app/log.txt 3)
second=$(score /tmp/none.txt 0)
printf '{"reward": %s, "log": %s, "none": %s}\n' "$(echo "$first $second" | awk '{print $1 + $2}')" "$first" "$second" > /logs/verifier/reward.json
