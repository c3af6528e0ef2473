# What one does with Rimrock, in one word each.

.DEFAULT_GOAL := help
.PHONY: help build run test lint bench vm-tests clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the release binary, target/release/rimrock
	cargo build --release --workspace

run: build ## serve a demonstration pool and take checkpoints through it (QUICKSTART=... passes options)
	target/release/rimrock quickstart $(QUICKSTART)

test: ## install what the tests need (as root), then lint, Rust tests and VM scenarios
	scripts/test

lint: ## rustfmt and clippy, both without mercy
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

vm-tests: build ## the VM scenarios alone
	vm-tests/run

bench: build ## measure the target against SPDK's, where that is installed
	target/release/rimrock bench target

clean: ## remove what was built; keeps downloads (.cache) and data (rimrock-data)
	cargo clean
