#!/bin/sh
sed -i 's/result = 1/result = 0/' /app/total.py
