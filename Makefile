# make demo   a run over the shipped sample against the simulator, results in out/demo
# make test   formatting, types and every test but those below
# make test-pictures   the test pictures of Pillow, pillow-heif and scikit-image, all of them, through the command line
# make test-chaos   20,000 rows under faults and kills; CHAOS_ROUNDS=10 repeats it
# make bench   what a request costs, beside other clients (some 4 minutes); make bench-full takes an hour or more
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-pictures test-chaos bench bench-full lint clean

demo: .venv/.demo
	rm -rf out/demo
	$(BIN)/python -m pipelines.run --input=pipelines/sample/requests.jsonl --output=out/demo \
	  --base_url='simulated?latency_ms=300&latency_sigma=0.5&error_rate=0.05' --num_workers=2
	@echo
	@echo "An answer, from out/demo/completed-*.jsonl:"
	@head -n 1 out/demo/completed-00000-of-*.jsonl
	@echo
	@echo "The whole run: out/demo/summary.json"

test: .venv/.test lint
	$(BIN)/python -m pytest

test-pictures: .venv/.test
	$(BIN)/python -m pytest -n0 tests/pictures

test-chaos: .venv/.test
	$(BIN)/python -m pytest -n0 -s tests/chaos

bench: .venv/.demo .cache/venv-bench/.short
	$(BIN)/python -m tests.benchmarks

bench-full: .venv/.demo .cache/venv-bench/.full
	$(BIN)/python -m tests.benchmarks --full $(ROUNDS:%=--rounds=%)

lint: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/.demo: setup.py
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.test: .venv/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

.cache/venv-bench/.short: tests/benchmarks/peers.txt
	$(PYTHON) -m venv .cache/venv-bench
	.cache/venv-bench/bin/pip install --quiet --disable-pip-version-check -r tests/benchmarks/peers.txt
	touch $@

.cache/venv-bench/.full: tests/benchmarks/peers-full.txt .cache/venv-bench/.short
	.cache/venv-bench/bin/pip install --quiet --disable-pip-version-check -r tests/benchmarks/peers-full.txt
	touch $@

clean:
	rm -rf .venv .cache out build dist *.egg-info
