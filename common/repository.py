"""Where the product's own files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder of run.py; processes are started in it
