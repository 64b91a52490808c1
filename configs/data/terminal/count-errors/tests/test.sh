#!/bin/bash
python3 -I /tests/test_outputs.py
