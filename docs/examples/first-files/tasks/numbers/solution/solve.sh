#!/bin/bash
seq 3 > numbers.txt
