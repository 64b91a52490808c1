#!/bin/bash
echo 'print("Hello")' > hello.py
