# Two commands on a fresh clone: `make demo` and `make test`. Both build .venv first, once. Also: make lint, make docs.
#   make demo MODEL=PATH   uses a local model folder instead of the download
#   make PYTHON=python3.12 setup   takes another interpreter (3.10 or newer) for a new .venv

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.setup-done
OLDER := .transformers4
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
EXTRAS := mpax,osqp,piqp,clarabel,moreau,cvxpy,torch,llm,report,demo,eval,quantize,adapter,docs,lint,bench,sklearn,test
MODEL ?=
DEMO_JSON ?=

.PHONY: setup test demo lint docs

setup: $(STAMP)

# The stamp is written last, so an interrupted set-up is taken up again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "qprecon needs Python 3.10 or newer; use make PYTHON=...")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# Every extra is installed, so a CPU backend that is missing or cannot be imported is a failure, not a skip. One BLAS thread for each of
# two processes: the tests are many and small.
# The tests of several processes fork them, which is safe only where no other test has left threads: they have a run of their own.
# What hangs on transformers runs again beside transformers 4 (tests/llm/conftest.py says what that is), which lies in a folder that goes
# before the environment's (not tasks: `datasets` there wants the newer hub).
test: $(STAMP) $(OLDER)/.done
	QPRECON_REQUIRE_ALL_BACKENDS=1 $(ONE_THREAD) $(VENV)/bin/python -m pytest -n 2 --dist worksteal --ignore tests/llm/ranks
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n 2 --dist worksteal tests/llm/ranks
	PYTHONPATH=$(OLDER) $(VENV)/bin/python -c 'import transformers; assert transformers.__version__.startswith("4."), transformers.__file__'
	PYTHONPATH=$(OLDER) $(ONE_THREAD) $(VENV)/bin/python -m pytest -n 2 --dist worksteal tests/llm --other-transformers \
		--ignore tests/llm/evaluation/test_tasks.py --ignore tests/llm/ranks

$(OLDER)/.done: $(STAMP) transformers4.txt
	rm -rf $(OLDER)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(OLDER) --requirement transformers4.txt
	touch $@

lint: $(STAMP)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy

# Into site/; warnings are errors. `make test` builds them too. What mkdocstrings says of a docstring zensical only prints, so it is
# looked for.
docs: $(STAMP)
	@said=$$($(VENV)/bin/python -m zensical build --clean --strict 2>&1); code=$$?; echo "$$said"; \
	test $$code -eq 0 && ! echo "$$said" | grep -q '^griffe:'

demo: $(STAMP)
	$(VENV)/bin/python -m qprecon demo $(if $(MODEL),--model '$(MODEL)') $(if $(DEMO_JSON),--json '$(DEMO_JSON)')
