# Every target does its own set-up: python3 (3.10 or newer, with venv), gcc and make are all that must be there.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARCHS ?= all

RUN := .venv/bin/python
READY := .venv/.ready
LAUNCHER := $(wildcard python/liger_aot/_launch.c python/liger_aot/_native/*)
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv packs wheel wheels check-wheels demo lint test test-fast sanitize soak golden docs clean

help:  ## this text
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo 'ARCHS=sm90,gfx942 chooses architectures for packs, wheel, wheels and demo (default: all).'
	@echo 'Where there is no torch, TORCH=... is installed into .venv (default: $(TORCH)).'

venv: $(READY)  ## .venv: the torch that is here or else one from the index, Triton, the tools, the launcher

$(READY): pyproject.toml setup.py .ci/venv $(LAUNCHER)
	@.ci/venv '$(PYTHON)' '$(TORCH)'
	@touch $@

packs: venv  ## compile, audit and pack the kernels: build/packs (what is compiled already is kept)
	@$(RUN) -m build_tools build --arch $(ARCHS)

wheel: packs  ## the wheel with the packs: dist
	@mkdir -p dist && rm -f dist/*.whl
	@$(RUN) -m build_tools wheel --arch $(ARCHS) --out dist > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist/*.whl

wheels: venv  ## what a release is made of: host wheel, device wheels, checksums, SBOM: dist
	@rm -rf dist && mkdir -p build
	@$(RUN) -m build_tools wheel --split --arch $(ARCHS) --out dist > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist

check-wheels: wheels  ## the checks before an upload, of dist
	@.ci/check-wheels dist

demo: wheel  ## install the wheel where there is no Triton and no compiler, and run RMSNorm
	@$(RUN) -m examples.fresh_environment build/demo-venv dist/*.whl
	@cd build/demo-venv && PATH="$$PWD/bin" python -I '$(CURDIR)/examples/demo.py'

lint: venv  ## ruff and mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

# Triton's interpreter needs a process of its own; tests on a GPU and those of time must not run beside each other.
test: ARCHS := all
test: packs  ## all tests
	@.ci/llvm
	TRITON_INTERPRET=1 $(RUN) -m pytest -q -m interpreter $(PARALLEL)
	LIGER_AOT_PACKS=build/packs $(RUN) -m pytest -q -m 'gpu or alone'
	@rm -f build/executed
	LIGER_AOT_EXECUTED=build/executed $(RUN) -m pytest -q -m 'not gpu and not alone' $(PARALLEL)
	@[ ! -e build/executed ] || $(RUN) -m tests.executed build/executed

test-fast: packs  ## the tests that take no more than a few seconds each
	$(RUN) -m pytest -q -m 'not slow and not gpu and not alone' $(PARALLEL)

sanitize: packs  ## compute-sanitizer's memcheck and racecheck over every binary of this machine's GPU
	@LIGER_AOT_PACKS=build/packs $(RUN) -m tests.sanitize

soak: packs  ## mixed ops, threads and streams on this machine's GPU: MINUTES=5 of them
	@LIGER_AOT_PACKS=build/packs $(RUN) -m tests.soak --minutes $(or $(MINUTES),5)

golden: venv  ## write the golden plans anew, after a profile or a declaration has changed
	@$(RUN) -c 'from build_tools.profile import profile_names; print(*profile_names(), sep="\n")' \
	| while read -r arch; do $(RUN) -m build_tools plan --arch "$$arch" > "tests/golden/plan_$$arch.txt"; done
	-@git --no-pager diff --stat -- tests/golden

docs: venv  ## write the generated pages of docs/ and the README's figures anew
	@$(RUN) -m docs.generate
	@$(RUN) -m benchmarks readme

clean:  ## remove what was built, but for .venv
	rm -rf build dist python/liger_aot.egg-info $(READY)
	find python -name '*.so' -delete
