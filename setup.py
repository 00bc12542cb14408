"""Where the packages of the tree are in a wheel: all but ``gpustream`` in ``gpustream/_packages``.

Their names are common ones. Beside gpustream, in ``site-packages``, they would lie where a distribution called
``topics`` has its files, and the last that is installed would win. ``gpustream/__init__.py`` finds them in both.
"""

from setuptools import find_packages, setup

INSIDE = ("delivery", "producers", "sinks", "streams", "topics")
HOME = "gpustream._packages"

setup(
    packages=[
        *find_packages(include=["gpustream", "gpustream.*"]),
        *(f"{HOME}.{name}" for name in find_packages(include=[*INSIDE, *(f"{one}.*" for one in INSIDE)])),
    ],
    package_dir={f"{HOME}.{name}": name for name in INSIDE},
)
