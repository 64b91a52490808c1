# Every target first installs the Python environment from a pinned lock file.
#   make run [CONFIG=name] [ARGS="key=value ..."]   make smoke   make setup
#   make test   make test-fast (no engine, no runs)   make test-long (nightly)   make check
#   make release VERSION=0.2.0
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST := $(VENV)/bin/python -m pytest
# Slow tests often wait, so there are more workers than cores. Files keep the order of `conftest.py`.
CORES := $(shell n=$$(nproc); [ "$$n" -lt 8 ] && echo "$$n" || echo 8)
AT_ONCE = -n $$(($(CORES) + $(1))) --dist loadfile --no-loadscope-reorder
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
LOCK := $(if $(HAS_GPU),requirements-gpu.lock,requirements-cpu.lock)
STAMP := $(VENV)/.installed-$(shell (sha256sum $(LOCK) || shasum -a 256 $(LOCK)) 2>/dev/null | cut -c1-16)

# Roles and tests share compiled bytecode. Otherwise each process would compile the product again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-fast test-long check format smoke setup system release clean
.DEFAULT_GOAL := run

run: $(STAMP)
	@$(VENV)/bin/python run.py $(if $(CONFIG),--config $(CONFIG)) dashboard=true $(ARGS)

test: $(STAMP) system
ifeq ($(ARGS),)
	@$(PYTEST) $(call AT_ONCE,1) -m "not long"
else
	@$(PYTEST) $(ARGS)
endif

# Folders whose unit tests train networks, play environments, start processes or wait.
HEAVY = end_to_end benchmarks docs actor/agents actor/engine actor/formats actor/api actor/seats \
  tools/checks tools/dashboard tools/evaluate tools/exchange common/host \
  common/join tools/launch tools/cli tools/copies common/weights envhub \
  tools/offline learner/policy tools/recompute learner/recovery tools/simulator \
  learner/training learner/weights actor/rollout/test_hubs.py \
  actor/formats/test_templates_of_models.py common/config/test_curriculum.py \
  common/config/test_knobs.py common/config/test_live_keys.py common/config/test_live_record.py \
  common/config/test_load.py \
  common/formats/test_own_template.py common/store/test_run_start.py common/test_quick_exit.py \
  common/wire/test_codec.py common/wire/test_hostile_peers.py common/wire/test_messages.py \
  common/wire/test_security.py common/wire/test_sockets.py \
  scheduler/curriculum/test_distance.py scheduler/episodes/test_leases_speed.py \
  scheduler/test_event_log.py scheduler/test_live_config.py \
  scheduler/test_properties.py scheduler/test_properties_learner.py

test-fast: $(STAMP)
	@$(PYTEST) $(call AT_ONCE,0) $(HEAVY:%=--ignore tests/%) -m "not slow and not gpu and not long" $(ARGS)

# Studies, fault campaigns, soaks and tests of many web pages, which run every night.
# Tests of seconds run last and alone, with their exact bounds; `make test` has generous ones.
test-long: $(STAMP) system
	@$(PYTEST) $(call AT_ONCE,1) -m "long and not timed" $(ARGS)
	@EXACT_TIMES=1 $(PYTEST) -m timed $(ARGS)

check: $(STAMP)
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/pyright
	@$(VENV)/bin/python -m tests.code_shape

format: $(STAMP)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

smoke: $(STAMP)
	@$(VENV)/bin/python run.py --config smoke run.name=smoke-$$$$ $(ARGS)

setup: $(STAMP)

# Installs Java (ScienceWorld), a browser (web environments), bubblewrap (sandboxes), a C++
# compiler and libnuma (vLLM on a CPU).
system: $(STAMP)
	@missing=""; \
	command -v java >/dev/null || missing="$$missing default-jre-headless"; \
	command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  command -v google-chrome >/dev/null || missing="$$missing chromium"; \
	command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	$(VENV)/bin/python -c 'from common.host.machine import *; exit(bool(compiler_problem()))' || \
	  missing="$$missing g++ python3-dev"; \
	$(VENV)/bin/python -c 'from common.host.machine import *; exit(bool(library_problem()))' || \
	  missing="$$missing libnuma1"; \
	install="apt-get install --yes --no-install-recommends $$missing"; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing" && apt-get update --quiet=2 && \
	  DEBIAN_FRONTEND=noninteractive $$install --quiet=2 >/dev/null; \
	else \
	  echo "The tests need these packages:$$missing. Run: sudo $$install" >&2; exit 1; \
	fi

release: $(STAMP)
	@$(VENV)/bin/python .ci/release "$(VERSION)" $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed, not %d.%d. Run: make PYTHON=python3.11" % sys.version_info[:2])'
	@[ "$$(uname -s)" = Linux ] || { echo "Linux is needed: the engine (vLLM) supports no other system."; exit 1; }
	@echo "installing $(LOCK) into $(VENV) (first start only); $$(sed -n '1s/^# *//p' $(LOCK))"
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
ifeq ($(HAS_GPU),)
	@$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
endif
	@$(VENV)/bin/python -m tools.install $(if $(HAS_GPU),,--no-deps) $(LOCK)
	@$(VENV)/bin/python -c 'import torch' || { echo "torch cannot be imported. Without a GPU, pip needs \
	PyTorch's CPU build. Run: pip config set global.extra-index-url https://download.pytorch.org/whl/cpu \
	and then: make clean setup"; exit 1; }
	@rm -f $(VENV)/.installed-*
	@touch $@
