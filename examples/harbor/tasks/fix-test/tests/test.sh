#!/bin/sh
# The verifier brings a test of its own, because the agent may have changed the one in /app.
cd /tests
if PYTHONPATH=/app python3 hidden_test.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
