# `make demo` shows rowcast at work, `make test` runs the whole suite; both set up .venv first.

# The first Python that is new enough; `make PYTHON=/path/to/python3.12 install` overrides.
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach python,$(CANDIDATES),$(shell $(python) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(python))))

BIN := .venv/bin
STAMP := .venv/.rowcast-installed

.PHONY: install demo test lint format clean

install: $(STAMP)

# The stamp is written last: an interrupted installation is taken up again by the next call.
# torch is pinned by the constraints: an open range would pull another gigabytes-large build.
$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "rowcast needs Python 3.11 or newer and none of $(CANDIDATES) is; install one, or name it with make PYTHON=/path/to/python3" >&2; exit 2; fi
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "rowcast needs Python 3.11 or newer and $(PYTHON) is not; name another with make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt install python3-venv) and run make again" >&2; exit 2; }
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing rowcast and its pinned dependencies into .venv: two minutes or so, 1 to 6 GB by the build of torch"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m rowcast.launch.demo

# Two processes, one of which runs all that starts Ray (tests/conftest.py); plain `pytest` runs the same in one.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
