"""Build the native library: a C++17 compiler, Cython and jaxlib's headers; no MPI (see docs/adr)."""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command import build_ext

NATIVE = Path("jaxcomm/_native")
STRICT = ["-Wall", "-Wextra", "-Werror"]
# For `make sanitize`: a library that looks for its own errors, and needs LD_PRELOAD to be loaded. GCC's warnings are less
# sure of themselves then.
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-O0", "-g1", "-Wno-error"]
sanitize = SANITIZE if os.environ.get("JAXCOMM_SANITIZE") else []


def jaxlib_headers() -> str:
    """The folder that jax.ffi.include_dir() names, found without JAX, which the build does not need."""
    package = find_spec("jaxlib").submodule_search_locations[0]
    return str(Path(package, "include"))


def compile_parallel(self, sources, output_dir=None, macros=None, include_dirs=None, debug=0,
                     extra_preargs=None, extra_postargs=None, depends=None):  # fmt: skip
    """The compiler's own method with the sources side by side, and warnings as errors in all but Cython's output."""
    macros, objects, extra, pp_opts, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs
    )
    common = self._get_cc_args(pp_opts, debug, extra_preargs)

    def compile_one(item):
        target, (source, suffix) = item
        warnings = STRICT if NATIVE in Path(source).parents else ["-w"]
        self._compile(target, source, suffix, common, [*extra, *warnings, *sanitize], pp_opts)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, build.items()))
    return objects


class BuildExt(build_ext.build_ext):
    def build_extensions(self):
        self.compiler.compile = compile_parallel.__get__(self.compiler)
        super().build_extensions()


bridge = Extension(
    "jaxcomm._native.bridge",
    [str(NATIVE / name) for name in ("bridge.pyx", "handlers.cpp", "watchdog.cpp")],
    depends=["setup.py", *(str(path) for path in sorted(NATIVE.iterdir()) if path.suffix in {".hpp", ".inc"})],
    include_dirs=[str(NATIVE)],
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-isystem", jaxlib_headers()],
    extra_link_args=sanitize,
    libraries=["dl", "pthread"],
    language="c++",
)

# Cython's output stays out of the source tree.
setup(ext_modules=cythonize([bridge], build_dir="build/cython"), cmdclass={"build_ext": BuildExt})
