# Longstride: every target makes the environment first, from a pinned lock file.
#   make run [CONFIG=name] [ARGS="key=value ..."]   make test   make check   make smoke   make setup
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
LOCK := $(if $(HAS_GPU),requirements-gpu.lock,requirements-cpu.lock)
STAMP := $(VENV)/.installed-$(shell (sha256sum $(LOCK) || shasum -a 256 $(LOCK)) 2>/dev/null | cut -c1-16)

SYSTEM_PACKAGES := default-jre-headless chromium
INSTALL_SYSTEM := apt-get install --yes --no-install-recommends $(SYSTEM_PACKAGES)

.PHONY: run test check format smoke setup system clean
.DEFAULT_GOAL := run

run: $(STAMP)
	@$(VENV)/bin/python run.py $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: $(STAMP) system
	@$(VENV)/bin/python -m pytest $(ARGS)

check: $(STAMP)
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/pyright

format: $(STAMP)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

smoke: $(STAMP)
	@$(VENV)/bin/python run.py --config smoke run.name=smoke-$$$$ $(ARGS)

setup: $(STAMP)

# Java for ScienceWorld and a browser for the web environments; their tests need both.
system:
	@{ command -v java && { command -v chromium || command -v chromium-browser || command -v google-chrome; }; } \
	  >/dev/null 2>&1 || { \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(SYSTEM_PACKAGES)" && apt-get update --quiet=2 && \
	  DEBIAN_FRONTEND=noninteractive $(INSTALL_SYSTEM) --quiet=2 >/dev/null; \
	else \
	  echo "the tests need Java and Chromium: sudo $(INSTALL_SYSTEM)" >&2; exit 1; \
	fi; }

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed; this is %d.%d. Use: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "installing $(LOCK) into $(VENV) (once; minutes)"
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
ifeq ($(HAS_GPU),)
	@$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@$(PIP) install --quiet --no-deps -r $(LOCK)
else
	@$(PIP) install --quiet -r $(LOCK)
endif
	@$(VENV)/bin/python -c 'import torch' || { echo "torch cannot be imported. Without a GPU pip must find \
	PyTorch's CPU build: add its CPU wheel index to your pip configuration (pip config set global.extra-index-url ...), \
	then: make clean setup"; exit 1; }
	@rm -f $(VENV)/.installed-*
	@touch $@
