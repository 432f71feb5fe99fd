"""Builds the parts in C: plain shared libraries that Python loads through ctypes."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibraries(build_ext):
    """Exports no module initialiser, since there is none."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


setup(
    ext_modules=[
        Extension(
            "expertserve.ops.ggml._kernels",
            [f"expertserve/ops/ggml/{name}.c" for name in ("kernels", "gemm", "attention", "recurrent")],
            depends=["expertserve/ops/ggml/gemm.h", "expertserve/ops/ggml/export.h"],
            extra_compile_args=["-O3", "-std=c11"],
        ),
        Extension(
            "expertserve.experts._reads",
            ["expertserve/experts/reads.c"],
            extra_compile_args=["-O2", "-std=c11", "-pthread"],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "expertserve.experts._forecast",
            ["expertserve/experts/forecast.c"],
            depends=["expertserve/experts/forecast.h"],
            extra_compile_args=["-O3", "-std=c11"],
            libraries=["m"],
        ),
        Extension(
            "expertserve.bench._replay",
            ["expertserve/bench/replay.c", "expertserve/experts/forecast.c"],
            depends=["expertserve/experts/forecast.h"],
            extra_compile_args=["-O3", "-std=c11"],
            libraries=["m"],
        ),
    ],
    cmdclass={"build_ext": BuildLibraries},
)
