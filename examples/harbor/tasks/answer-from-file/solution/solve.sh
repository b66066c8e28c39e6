#!/bin/sh
tail -n +2 /app/stock.csv | awk -F, '{print $2 * $3, $1}' | sort -n | tail -1 | cut -d' ' -f2 > /app/answer.txt
