#!/bin/sh
echo 'grep -ic error "$1" || true' > /app/count.sh
