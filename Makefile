# Nothing but Python 3.11 or newer, git and make is needed; what else there is to install, .ci/setup installs.
#
#   PYTHON=python3.12       interpreter for .venv (`make clean` first, if there is one)
#   PYTEST_ARGS="-k mqtt"   what `make test` and `make test-slow` pass on; `-n 0` for one test at a time
#   SETUP_BROKERS=no        do not let `make test` install system packages

BIN := .venv/bin
# The tests wait more than they work: five processes keep two cores busy.
PARALLEL := --numprocesses 5 --dist worksteal
TIMES ?= 50
SEEDS ?= 1000

# The tests start hundreds of processes: without this, each would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-system test-lowest test-matrix test-stress durations lint types bench soak soak-tokens failover kills distributed remote-events gateway simulate venv clean

help:
	@echo "make demo   the toolkit at work, in this process, without a broker"
	@echo "make test   the tests; installs Mosquitto, RabbitMQ, PostgreSQL and Java if they are missing"
	@echo "make test-slow   the tests that take long: soaks, random kills, benchmarks, the browser, thorough properties"
	@echo "make test-stress   changed tests many times, half under load (TESTS='tests/mqtt' TIMES=50 STRESS_ARGS=...)"
	@echo "make durations   write tests/durations.md: what the tests cost (DURATIONS_ARGS=record.json for a run that was)"
	@echo "make test-system   a selection on the system's own Python, where .venv has another version"
	@echo "make test-lowest   a selection with the lowest admitted version of every direct dependency"
	@echo "make test-matrix   the tests on every Python from 3.11 that is found"
	@echo "make lint   ruff, and the layers of the packages        make types  mypy"
	@echo "make bench  benchmarks against private brokers (BENCH_ARGS=...)"
	@echo "make soak   an hour of random faults (SOAK_ARGS='--minutes 10 --protocol amqp --seed 7')"
	@echo "make soak-tokens   ten minutes of credentials that expire (SOAK_ARGS='--minutes 1 --lifetime 3')"
	@echo "make failover   20 kills of the connected one of several brokers (FAILOVER_ARGS='--kills 5 --protocol mqtt')"
	@echo "make kills  hundreds of random SIGKILLs with messages on the disk (KILLS_ARGS='--kills 50 --protocol amqp')"
	@echo "make distributed   210 random faults under distributed events (DISTRIBUTED_ARGS='--faults 20 --protocol amqp')"
	@echo "make remote-events   600 random SIGKILLs of a chain of remote events (REMOTE_ARGS='--kills 20 --protocol amqp')"
	@echo "make gateway   300 random SIGKILLs of a gateway, black holes, restarts of brokers (GATEWAY_ARGS='--kills 20')"
	@echo "make simulate   random programs in simulated worlds (SEEDS=10000 SERVICE=mailbox SIMULATE_ARGS='--protocol mqtt5')"
	@echo "make venv   only .venv, with everything for development"
	@echo "make clean  remove all that is generated, .venv too"

demo: .venv/.cli
	@$(BIN)/messaging demo

test: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/.dev
	@.ci/setup brokers
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest $(PARALLEL) --timeout 300 -m "slow and not alone" $(PYTEST_ARGS)
	@$(BIN)/python -m pytest --timeout 300 -m "slow and alone" $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: PYTEST_ARGS select none of them

test-stress: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.stress --times $(TIMES) $(STRESS_ARGS) $(TESTS)

durations: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.durations $(DURATIONS_ARGS)

test-system test-lowest test-matrix: test-%: .venv/.dev
	@.ci/setup brokers
	@.ci/elsewhere $*

lint: .venv/.dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --cache-dir .cache/import-linter

types: .venv/.dev
	@$(BIN)/mypy

bench: .venv/.bench
	@.ci/setup brokers
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

soak-tokens: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.tokens $(SOAK_ARGS)

failover: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.failover $(FAILOVER_ARGS)

kills: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.kills $(KILLS_ARGS)

distributed: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.distributed $(DISTRIBUTED_ARGS)

remote-events: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.remote $(REMOTE_ARGS)

gateway: .venv/.dev
	@.ci/setup brokers
	@$(BIN)/python -m tests.faults.gateway $(GATEWAY_ARGS)

simulate: .venv/.dev
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(SERVICE),--service $(SERVICE)) $(SIMULATE_ARGS)

venv: .venv/.dev

.venv/.cli .venv/.dev .venv/.bench: .venv/.%: pyproject.toml
	@.ci/setup venv $*

clean:
	@rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
