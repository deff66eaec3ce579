# `make demo` and `make test` are all that a visitor needs; `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash -euo pipefail
UV := build/tools/bin/uv
PYTHON := .venv/bin/python
export UV_PYTHON_DOWNLOADS := never
# Hundreds of processes of the demo and the tests import the same modules: compiled once, kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: install
install: ## install what is missing and build both native wheels into .venv
	@scripts/bootstrap
	@$(UV) sync --locked --quiet --inexact
	@echo "install: .venv is ready (flyer, hfreduce, threefs, torch)" >&2

.PHONY: demo
demo: install ## run the main job on this machine, break things under it, compare the bits
	@$(PYTHON) -m demo

.PHONY: check
check: install check-static test-unit ## format, lint, types, import rules, unit tests: under two minutes

.PHONY: check-static
check-static: ## format, lint, types, import rules, commit subjects
	scripts/check-commits
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

# The stages of `make test`: tests/stages.py divides the Python tests. Cargo always selects the
# whole workspace and filters by the tests' names, so that features and builds are the same.
SIMULATOR_CRATES := collectives/crates/hfreduce-sim csi-3fs/crates/threefs-sim
CRATES := fabric $(patsubst %/Cargo.toml,%,$(wildcard */crates/*/Cargo.toml))
rust_tests = $(addprefix --test ,$(sort $(basename $(notdir $(wildcard $(addsuffix /tests/*.rs,$(1))) \
	$(patsubst %/main.rs,%,$(wildcard $(addsuffix /tests/*/main.rs,$(1))))))))

.PHONY: test test-unit test-simulators test-services test-mounts
test: install ## all tests: units, properties, simulators, real processes, mounts, the demo
	@scripts/stages test-unit test-simulators test-services test-mounts
test-unit: ## pure code
	cargo test --workspace --lib --bins --locked --quiet
	$(PYTHON) -m pytest -q -n 2 --dist loadgroup --stage unit
test-simulators: ## seeded histories of the scheduler, the collectives and the file system
	cargo test --workspace $(call rust_tests,$(SIMULATOR_CRATES)) --locked --quiet
	$(PYTHON) -m pytest -q -n 2 --dist loadgroup --stage simulators
test-services: ## services, ranks and operators as real processes; then those that run alone
	@scripts/bootstrap prometheus=promtool postgresql=pg_ctlcluster
	FIRE_FLYER_ETCD=$$($(PYTHON) -m testcluster build etcd | sed -n 's/^etcd=//p') \
	FIRE_FLYER_POSTGRES=$$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1) \
		cargo test --workspace $(call rust_tests,$(filter-out $(SIMULATOR_CRATES),$(CRATES))) --locked --quiet
	cargo test --workspace --doc --locked --quiet
	$(PYTHON) -m pytest -q -n 3 --dist loadgroup --stage services -m 'not alone'
	$(PYTHON) -m pytest -q -n 2 --dist loadgroup --stage services -m alone
test-mounts: ## FUSE mounts and the CSI driver
	$(PYTHON) -m pytest -q -n 3 --dist loadgroup --stage mounts

.PHONY: sanitize
sanitize: ## the native tests of the collectives under the thread and the address sanitizer: long
	scripts/sanitize

.PHONY: soak
soak: install ## the tests with random events again, longer and with more seeds, and twenty kills
	cargo test --package hfreduce-engine --test outstanding --locked --quiet -- --ignored
	$(PYTHON) -m pytest -q -m soak
	$(PYTHON) -m demo.chaos

.PHONY: chaos
chaos: install ## 3FS under kills and stops: nothing acknowledged lost, linearizable (RUNS=200 SEED=1 SECONDS_EACH=8)
	@$(PYTHON) -m testcluster build --quiet etcd
	$(PYTHON) -m bench.chaos $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(SECONDS_EACH),--duration $(SECONDS_EACH))

.PHONY: fix
fix: install ## format, mend what the linters can, write the generated files
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
	cargo fmt --all
	$(PYTHON) -m flyer.api.crd
	$(PYTHON) -m flyer.api.reference
	$(PYTHON) -m flyer.cli.completion
	$(PYTHON) -m charts.generate

.PHONY: bench bench-collectives bench-training bench-storage bench-sched figure7 figures8-9
bench: bench-collectives bench-training bench-storage bench-sched ## side by side with peers in one run; JSON in build/bench
bench-collectives: install ## HFReduce, Gloo, Open MPI, MPICH and the machine's limits (ONLY=pair,tcp ROUNDS=5 QUICK=1)
	@scripts/bootstrap openmpi-bin=mpirun.openmpi libopenmpi-dev=mpicc.openmpi mpich=mpirun.mpich libmpich-dev=mpicc.mpich \
	    || echo "bench-collectives: continuing without them" >&2
	cargo build --release --locked --quiet -p hfreduce-c
	$(PYTHON) -m bench.collectives $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(QUICK),--quick)
bench-training: install ## steps of torch's DDP over Gloo and HFReduce, and of haiscale's (ONLY=gpt,wire,backends,fsdp,fsdp-wire,pipeline,pipeline-wire,moe,tensor,cost ROUNDS=5 QUICK=1)
	@scripts/bootstrap iproute2=ip || echo "bench-training: continuing without namespaces" >&2
	$(PYTHON) -m bench.training $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(QUICK),--quick)
.PHONY: trace
trace: install ## a traced run of the GPT on four ranks: build/bench/trace.svg, heatmap.svg
	@scripts/bootstrap iproute2=ip || echo "trace: continuing without namespaces" >&2
	$(PYTHON) -m bench.training.traced
figure7: ## the paper's Figure 7 on simulated machines: build/bench/figure7.{svg,json}
	@mkdir -p build/bench
	cargo run --quiet --locked --package hfreduce-sim -- figure7 -o build/bench/figure7.svg --json build/bench/figure7.json
figures8-9: ## the paper's Figures 8 and 9 from constants: build/bench/figure{8,9}.svg, figures8-9.json
	$(PYTHON) -m haiscale.model figures -o build/bench
bench-storage: install ## 3FS, fio, iperf3, GlusterFS and MooseFS on one machine
	@scripts/bootstrap fio=fio
	@scripts/bootstrap iperf3=iperf3 || echo "bench-storage: continuing without iperf3" >&2
	@scripts/bootstrap glusterfs-server=glusterd glusterfs-client=mount.glusterfs \
	    || echo "bench-storage: continuing without GlusterFS" >&2
	@scripts/bootstrap moosefs-master=mfsmaster moosefs-chunkserver=mfschunkserver \
	    moosefs-client=mfsmount iproute2=ip || echo "bench-storage: continuing without MooseFS" >&2
	$(PYTHON) -m bench.storage
.PHONY: bench-storage-load
bench-storage-load: install ## 3FS with 4, 24 and 96 writers, services that are stopped, 120 readers of which half stop
	$(PYTHON) -m bench.storage_load
.PHONY: bench-incast
bench-incast: install ## 64 services answer few receivers over links with short queues, half of them slow (needs root)
	cargo build --release --locked --quiet -p fabric --example incast
	$(PYTHON) -m bench.incast
.PHONY: bench-hostile
bench-hostile: cluster-tools ## one tenant's requests while every port is flooded, and 3,000 large jobs (ROUNDS=2 JOBS=3000)
	@$(PYTHON) -m testcluster build --quiet kwok kube-scheduler
	$(PYTHON) -m bench.hostile $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(JOBS),--jobs $(JOBS))
bench-sched: cluster-tools ## the operator and kube-scheduler's gangs (ONLY=gang,small ROUNDS=1 MISSING=1)
	@$(PYTHON) -m testcluster build --quiet kwok kube-scheduler
	$(PYTHON) -m bench.scheduler $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(MISSING),--missing)

# Debian packages and a command of each.
CLUSTER_PACKAGES := etcd-server=etcd containerd=containerd runc=runc iptables=iptables \
	containernetworking-plugins=/usr/lib/cni/bridge conntrack=conntrack mmdebstrap=mmdebstrap

.PHONY: cluster-tools cluster-up cluster-down images e2e
cluster-tools: install ## build what a test cluster needs: minutes once, then kept in ~/.cache
	@scripts/bootstrap $(CLUSTER_PACKAGES)
	@$(PYTHON) -m testcluster build --quiet
	@$(PYTHON) -m testcluster prune --quiet

cluster-up: cluster-tools ## a real Kubernetes in build/cluster/default (LIGHT=1: no nodes, KWOK=512: fake ones)
	$(PYTHON) -m testcluster up $(if $(LIGHT),--light --controllers) $(if $(KWOK),--kwok=$(KWOK))

cluster-down: ## remove it without a trace
	$(PYTHON) -m testcluster down

images: cluster-tools ## the container images as archives, without a daemon
	$(PYTHON) -m images.build

.PHONY: images-check
images-check: install ## build every Containerfile without Docker and start what it installs
	@scripts/bootstrap mmdebstrap=mmdebstrap buildah=buildah
	$(PYTHON) -m images.check $(IMAGE)

# What of `make e2e` guards every change: the tests of a real API server, and a quarter of an hour
# of scenarios on real kubelets. Programs and images are built once and kept in ~/.cache/fire-flyer.
KUBERNETES_SCENARIOS := $(addprefix e2e/tests/,administration cli collectives hardware scheduling storage)
E2E := FLYER_E2E_ENGINE=processes FLYER_E2E_REQUIRED=1 $(PYTHON) -m pytest -v --no-header

.PHONY: test-servers test-kubernetes
test-servers: cluster-tools ## the tests of all parts that need a real API server, without nodes
	$(E2E) -m real_server --junitxml=build/e2e/servers.xml
test-kubernetes: test-servers images ## those, and a quarter of an hour of scenarios on real kubelets
	$(E2E) $(KUBERNETES_SCENARIOS) --junitxml=build/e2e/kubernetes.xml
e2e: test-servers images images-check ## all scenarios on a real Kubernetes; JUnit files in build/e2e
	$(E2E) e2e/tests --junitxml=build/e2e/junit.xml

# Debian packages and a file of each.
KIND_PACKAGES := podman=podman runc=runc netavark=/usr/lib/podman/netavark \
	aardvark-dns=/usr/lib/podman/aardvark-dns

KIND_SCENARIOS := $(addprefix e2e/tests/,scheduling/test_first_job.py scheduling/test_suspend.py \
	storage/test_volumes.py hardware/test_device_plugin.py)

.PHONY: e2e-kind
e2e-kind: images ## the first scenarios on kind, with Docker or Podman (root)
	@docker info >/dev/null 2>&1 || scripts/bootstrap $(KIND_PACKAGES)
	FLYER_E2E_ENGINE=kind FLYER_E2E_REQUIRED=1 $(PYTHON) -m pytest -v --no-header \
		$(KIND_SCENARIOS) --junitxml=build/e2e/kind.xml

.PHONY: site site-only release-check
site: install site-only ## the documentation site in build/site, every link checked
site-only:
	@scripts/bootstrap
	@$(UV) sync --locked --quiet --inexact --no-install-workspace --only-group dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
release-check: install ## everything that a release publishes, in build/release; publishes nothing
	$(PYTHON) -m scripts.release

.PHONY: clean
clean: ## remove all that was built
	rm -rf build target .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
