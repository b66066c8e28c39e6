#!/bin/sh
if [ "$(tr -d '[:space:]' < /app/answer.txt)" = chair ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
