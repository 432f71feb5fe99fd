"""Builds the CPU kernels: a plain shared library that Python loads through ctypes, not an extension module."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Exports no module initialiser, since there is none."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


setup(
    ext_modules=[
        Extension(
            "expertserve.ops.ggml._kernels",
            [f"expertserve/ops/ggml/{name}.c" for name in ("kernels", "gemm", "attention")],
            depends=["expertserve/ops/ggml/gemm.h", "expertserve/ops/ggml/export.h"],
            extra_compile_args=["-O3", "-std=c11"],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
