# Every target does its own set-up: python3 (3.10 or newer, with venv), gcc and make are all that must be there.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARCHS ?= all

RUN := .venv/bin/python
BUILDS := .venv/.builds
READY := .venv/.ready
SETUP := pyproject.toml setup.py .ci/venv $(wildcard python/liger_aot/_launch.c python/liger_aot/_native/*)
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
ORDERED := -n auto --maxprocesses 8 --dist load --maxschedchunk 1

.DEFAULT_GOAL := help
.PHONY: help venv packs wheel wheels check-wheels demo lint test test-all test-more test-aarch64 sanitize sanitize-launcher soak golden docs clean

help:  ## this text
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo 'ARCHS=sm90,gfx942 chooses architectures for packs, wheel and wheels (default: all).'
	@echo 'Where there is no torch, TORCH=... is installed into .venv (default: $(TORCH)).'

venv: $(READY)  ## .venv: the torch that is here or else one from the index, Triton, the tools, the launcher

$(BUILDS): $(SETUP)
	@.ci/venv '$(PYTHON)' '$(TORCH)' build demo
	@touch $@

$(READY): $(BUILDS)
	@.ci/venv '$(PYTHON)' '$(TORCH)' build demo test lint wheels
	@touch $@

packs: venv  ## compile, audit and pack the kernels: build/packs (what is compiled already is kept)
	@$(RUN) -m liger_aot_build build --arch $(ARCHS)

wheel: packs  ## the wheel with the packs: dist
	@mkdir -p dist && rm -f dist/*.whl
	@$(RUN) -m liger_aot_build wheel --arch $(ARCHS) --out dist > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist/*.whl

wheels: venv  ## what a release is made of: host wheel, device wheels, checksums, SBOM: dist
	@rm -rf dist && mkdir -p build
	@$(RUN) -m liger_aot_build wheel --split --arch $(ARCHS) --out dist > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist

check-wheels: wheels  ## the checks before an upload, of dist
	@.ci/check-wheels dist

demo:  ## build a wheel of a few ops, install it where there is no Triton and no compiler, run it
	@began=$$(date +%s); [ -e $(BUILDS) ] && setup= || setup=yes; $(MAKE) --no-print-directory $(BUILDS) && \
	DEMO_BEGAN=$$began DEMO_SETUP=$${setup:+$$(($$(date +%s) - began)) s} .ci/demo

lint: venv  ## ruff and mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

# Triton's interpreter needs a process of its own. Tests compile the binaries that they run (build/cache keeps them).
test: venv  ## a cross-section of the tests, without a GPU: every op, every kernel form
	@rm -f build/executed && mkdir -p build
	@.ci/stages \
	'interpreter=TRITON_INTERPRET=1 $(RUN) -m pytest -q -m "interpreter and not slow" $(PARALLEL)' \
	'tests=LIGER_AOT_EXECUTED=build/executed $(RUN) -m pytest -q -m "not gpu and not slow" $(PARALLEL)' \
	'forms=$(RUN) -m tests.harness.executed --forms build/executed'

test-all: ARCHS := all
test-all: packs  ## every test, and every AMD binary executed; with a GPU, the tests on it
	@rm -f build/executed
	@.ci/stages \
	'interpreter=TRITON_INTERPRET=1 $(RUN) -m pytest -q -m interpreter $(PARALLEL)' \
	'gpu=LIGER_AOT_PACKS=build/packs $(RUN) -m pytest -q -m gpu' \
	'tests=LIGER_AOT_PACKS=build/packs LIGER_AOT_EXECUTED=build/executed $(RUN) -m pytest -q -m "not gpu" $(PARALLEL)' \
	'binaries=LIGER_AOT_PACKS=build/packs $(RUN) -m tests.harness.executed build/executed'

test-more: venv  ## of the tests that make test leaves out as many as end by UNTIL (of time.time), FIRST words first
	@half=$$((($$(date +%s) + $(UNTIL)) / 2)); export LIGER_AOT_FIRST='$(FIRST)'; .ci/stages \
	"slow tests=LIGER_AOT_UNTIL=$$half $(RUN) -m pytest -q -m 'slow and not gpu' $(ORDERED)" \
	"slow interpreter=LIGER_AOT_UNTIL=$(UNTIL) TRITON_INTERPRET=1 $(RUN) -m pytest -q -m 'slow and interpreter' $(ORDERED)"

sanitize: packs  ## compute-sanitizer's memcheck and racecheck, and guard pages, over every binary of this machine's GPU
	@LIGER_AOT_PACKS=build/packs $(RUN) -m tests.harness.sanitize

soak: packs  ## mixed ops, threads and streams on this machine's GPU: MINUTES=5 of them
	@LIGER_AOT_PACKS=build/packs $(RUN) -m tests.harness.soak --minutes $(or $(MINUTES),5)

sanitize-launcher: venv  ## the launcher and a stand-in driver under the address and undefined-behaviour sanitizers
	@$(RUN) -m tests.harness.sanitize_launcher

test-aarch64: venv  ## the aarch64 host wheel, cross-compiled, under user-mode emulation
	@.ci/aarch64 test

golden: venv  ## write the golden plans anew, after a profile or a declaration has changed
	@$(RUN) -c 'from liger_aot_build.profile import profile_names; print(*profile_names(), sep="\n")' \
	| while read -r arch; do $(RUN) -m liger_aot_build plan --arch "$$arch" > "tests/golden/plan_$$arch.txt"; done
	-@git --no-pager diff --stat -- tests/golden

docs: venv  ## write the generated pages of docs/ and the tables of figures in README.md and docs/performance.md anew
	@$(RUN) -m docs.generate
	@$(RUN) -m benchmarks performance

clean:  ## remove what was built, but for .venv
	rm -rf build dist python/liger_aot.egg-info $(BUILDS) $(READY)
	find python -name '*.so' -delete
