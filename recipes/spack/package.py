"""A recipe for Spack: put this folder into a repository of yours, and run ``spack install --no-checksum py-ourddp``."""

import os

from spack.package import *


class PyOurddp(PythonPackage):
    """A c10d backend and a DistributedDataParallel reducer for PyTorch, for one machine or several."""

    # The source distribution that `make dist` writes, in the folder from which Spack is called.
    manual_download = True
    url = f"file://{os.getcwd()}/ourddp-0.1.0.tar.gz"

    version("0.1.0")

    variant("mpi", default=True, description="Let MPI carry data between nodes where it is asked for")
    variant("cuda", default=False, description="Serve tensors of CUDA devices")

    depends_on("cxx", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-ninja", type="build")
    depends_on("py-torch@2.11:2.15", type=("build", "link", "run"))
    depends_on("mpi", when="+mpi")
    depends_on("cuda@11.8:", when="+cuda")

    def setup_build_environment(self, env):
        """Say what is built. An option that cannot be honoured is an error of the build."""
        env.set("OURS_WITH_MPI", "1" if "+mpi" in self.spec else "0")
        env.set("OURS_WITH_CUDA", "1" if "+cuda" in self.spec else "0")
