# make wheel | demo | test | test-matrix | soak | sanitize | bench | bench-peers | bench-smoke | lint | clean
#
# PYTHON=python3.12                       the interpreter (default: python3, else what there is from 3.11 on)
# make test MPI=mpich RANKS=3 ARGS="-k Allreduce"    a part; RANKS alone means the tests under mpiexec alone
# make test PARTS=single                  a part of: single (no mpiexec), world (under mpiexec), jobs (start one)
# make soak MPI=openmpi SOAK="--programs 2000"             options of tests/soak/run.py: the long tests of docs/reliability.md
# make sanitize ARGS="tests/world/test_values.py"          the native layer under sanitizers
# make bench MPI=openmpi BENCH="--parts latency loops"     options of benchmarks/run.py; bench-peers: mpi4jax as well
#
# Environments (.envs/cp<Python>-jax<version>-<MPI>) and wheels are kept and renewed when their sources change.

MAKEFLAGS += --no-builtin-rules
.SECONDEXPANSION:
# The suites share two cores and one source tree.
.NOTPARALLEL:

# The environments are installed without byte code, which the first run is to leave behind.
unexport PYTHONDONTWRITEBYTECODE
find = PYTHON='$(PYTHON)' .ci/find-python
ifneq ($(MAKECMDGOALS),clean)
DEFAULT := $(or $(shell $(find)),$(error no usable Python))
TAG     := $(shell $(DEFAULT) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
endif
PARTS   := $(if $(RANKS),world,single world jobs)
TIMEOUT := 2400

ENVS   := $(foreach mpi,$(or $(MPI),mpich openmpi),$(TAG)-jaxnewest-$(mpi))
MATRIX := cp311-jax0.8.1-mpich cp313-jaxnewest-openmpi cp311-jax0.10.2-impi
MATRIX := $(foreach mpi,$(or $(MPI),mpich openmpi impi),$(filter %-$(mpi),$(MATRIX)))
DEMO   := $(firstword $(ENVS))

.PHONY: wheel demo test test-matrix soak sanitize bench bench-peers bench-smoke lint clean
wheel: build/wheels/$(TAG)/ok

# The interpreter that an environment or a wheel is named after.
tag    = $(firstword $(subst -, ,$(1)))
python = $(or $(shell $(find) 3.$(patsubst cp3%,%,$(call tag,$(1)))),$(error no Python for $(1)))

.envs/%/deps: pyproject.toml .ci/envs.py
	@echo "environment $*"
	@$(call python,$*) .ci/envs.py create $*

SOURCES := setup.py pyproject.toml $(shell find jaxcomm -name __pycache__ -prune -o -not -name '*.so' -print)
build/wheels/%/ok: .envs/%-build/deps $(SOURCES)
	@echo "wheel for $*"
	@$(call python,$*) .ci/envs.py wheel $*

.envs/%/ok: .envs/%/deps build/wheels/$$(call tag,$$*)/ok
	@$(call python,$*) .ci/envs.py install $*

.envs/%/examples: .envs/%/deps
	@$(call python,$*) .ci/envs.py extra $* examples

.envs/%/peers: .envs/%/deps
	@$(call python,$*) .ci/envs.py peers $*

.PRECIOUS: .envs/%/deps .envs/%/ok .envs/%/examples .envs/%/peers build/wheels/%/ok

demo: .envs/$(DEMO)/ok .envs/$(DEMO)/examples
	@OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 .envs/$(DEMO)/bin/mpiexec -n 2 .envs/$(DEMO)/bin/python -P examples/digits.py

# plain(part, environment): the tests that pytest runs by itself, those of the examples and half of the jobs under the first MPI only; that ARGS selects none of them (5) is no failure.
define plain
.PHONY: $(1)/$(2)
$(1)/$(2): .envs/$(2)/ok $(if $(filter jobs,$(1)),.envs/$(2)/examples)
	@echo "== $(1) tests, $(2)"
	@.envs/$(2)/bin/pytest tests/$(1) $(if $(filter jobs,$(1)),$(if $(filter $(DEMO),$(2)),,--ignore tests/jobs/test_examples.py $(if $(MPI),,--share 1/2))) $$(ARGS) || [ $$$$? = 5 -a -n '$$(ARGS)' ]
endef

# Derivatives and vmap take the most time and are the same Python and XLA under every MPI and number of ranks from 3 on:
# `make test` runs them on 3 ranks under MPICH, the matrix on 2 under the oldest JAX and on 3 under Open MPI; RANKS= always
# does.
CALCULUS := $(patsubst %,%/2,$(filter %-jax0.8.1-mpich,$(MATRIX))) $(patsubst %,%/3,$(filter cp313-%,$(MATRIX))) \
            $(TAG)-jaxnewest-mpich/3
calculus = $(if $(RANKS)$(filter $(1)/$(2),$(CALCULUS)),,-m 'not calculus')

# Four ranks on two cores take the most time for the least news, so each test runs there under one of the two MPIs; under
# Open MPI on two or on three ranks; and in one of the two environments of the matrix. RANKS= and MPI= run all.
HALF_0 := $(TAG)-jaxnewest-mpich/4 $(TAG)-jaxnewest-openmpi/2 $(patsubst %,%/2,$(filter %-jax0.8.1-mpich,$(MATRIX))) $(patsubst %,%/3,$(filter %-impi,$(MATRIX)))
HALF_1 := $(TAG)-jaxnewest-openmpi/3 $(TAG)-jaxnewest-openmpi/4 $(patsubst %,%/3,$(filter cp313-%,$(MATRIX)))
share = $(if $(RANKS)$(MPI),,$(if $(filter $(1)/$(2),$(HALF_0)),--share 0/2,$(if $(filter $(1)/$(2),$(HALF_1)),--share 1/2)))

# world(environment, ranks)
define world
.PHONY: world/$(1)/$(2)
world/$(1)/$(2): .envs/$(1)/ok
	@echo "== world tests, $(2) ranks, $(1)"
	@.envs/$(1)/bin/python tests/launch.py -n $(2) --timeout $(TIMEOUT) -- tests/world $(call calculus,$(1),$(2)) $(call share,$(1),$(2)) $$(ARGS)
endef

# Checking mode raises no false alarm: some of the tests with it on, on 2 ranks under the first MPI.
CHECKED := $(patsubst %,tests/world/test_%.py,messages drop_in order ragged functional values)
.PHONY: checked
checked: .envs/$(DEMO)/ok
	@echo "== world tests in checking mode, 2 ranks, $(DEMO)"
	@JAXCOMM_CHECK=1 .envs/$(DEMO)/bin/python tests/launch.py -n 2 --timeout $(TIMEOUT) -- $(CHECKED)

define suites
$(foreach part,single jobs,$(call plain,$(part),$(1))$(newline))
$(foreach n,1 2 3 4,$(call world,$(1),$(n))$(newline))
endef
define newline


endef
$(foreach env,$(sort $(ENVS) $(MATRIX)),$(eval $(call suites,$(env))))

test: $(if $(filter single,$(PARTS)),single/$(firstword $(ENVS)))
test: $(if $(filter world,$(PARTS)),$(foreach env,$(ENVS),$(foreach n,$(or $(RANKS),1 2 3 4),world/$(env)/$(n))))
test: $(if $(filter world,$(PARTS)),$(if $(RANKS)$(ARGS),,checked))
test: $(if $(filter jobs,$(PARTS)),$(ENVS:%=jobs/%) $(if $(ARGS),,bench-smoke))
matrix_ranks = $(or $(RANKS),$(if $(filter %-jax0.8.1-mpich,$(1)),2,3))
test-matrix: $(foreach env,$(MATRIX),$(foreach n,$(call matrix_ranks,$(env)),world/$(env)/$(n)))

# Hours; figures are left in build/soak/<environment>, and tests/soak/page.py makes docs/reliability.md of them.
SOAK_ENV := $(TAG)-jaxnewest-$(firstword $(MPI) mpich)
soak: .envs/$(SOAK_ENV)/ok
	@.envs/$(SOAK_ENV)/bin/python tests/soak/run.py --output build/soak/$(SOAK_ENV) $(SOAK)

# A build of its own, beside the wheel; the tests are those that reach most of the native layer.
SANITIZED := build/sanitized/$(TAG)
WATCHED := tests/single/test_entry_points.py $(patsubst %,tests/world/test_%.py,errors values messages requests ragged neighbors \
           trees dtypes large threads checking checked_messages timeline random_programs) -m 'not calculus'
sanitize: .envs/$(TAG)-build/deps .envs/$(SOAK_ENV)/ok
	@JAXCOMM_SANITIZE=1 .envs/$(TAG)-build/bin/python setup.py -q build --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/temp
	@.envs/$(SOAK_ENV)/bin/python tests/sanitize.py --package $(SANITIZED)/lib -- $(or $(ARGS),$(WATCHED))

# Figures, tables and plots are left in build/benchmarks/<environment>; benchmarks/report.py makes docs/performance.md of them.
BENCH_ENV := $(TAG)-bench-$(firstword $(MPI) mpich)
PEERS_ENV := $(TAG)-peers-$(firstword $(MPI) mpich)
benchmark  = .envs/$(1)/bin/python benchmarks/run.py --output build/benchmarks/$(1) $(2) $(BENCH)
bench: .envs/$(BENCH_ENV)/ok
	@$(call benchmark,$(BENCH_ENV))
bench-peers: .envs/$(PEERS_ENV)/peers .envs/$(PEERS_ENV)/ok
	@$(call benchmark,$(PEERS_ENV))
bench-smoke: .envs/$(DEMO)/ok .envs/$(DEMO)/examples
	@$(call benchmark,$(DEMO),--smoke) > build/bench-smoke.log 2>&1 || { cat build/bench-smoke.log; exit 1; }

LINT   := .envs/$(TAG)-lint
# Not the .inc tables: their rows are laid out to be read as columns.
NATIVE := $(wildcard jaxcomm/_native/*.cpp jaxcomm/_native/*.hpp)
CHECKS := "ruff check --quiet ." "ruff format --quiet --diff ." "mypy --no-error-summary" "cython-lint jaxcomm" \
          "clang-format --dry-run -Werror $(NATIVE)" "codespell $$(git ls-files)"
lint: $(LINT)/deps
	@PATH="$(CURDIR)/$(LINT)/bin:$$PATH"; status=0; for check in $(CHECKS); do $$check || status=1; done; exit $$status

clean:
	rm -rf build .envs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
