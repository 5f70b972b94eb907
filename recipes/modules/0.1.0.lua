-- A module file for Lmod, as modules/ourddp/0.1.0.lua: the package in an environment of its own, made by
--   python -m venv /opt/ourddp/0.1.0 && /opt/ourddp/0.1.0/bin/pip install ourddp-*.whl
local root = "/opt/ourddp/0.1.0"

help([[PyTorch with the backend "ours". `python -m ourddp info` shows what was built.]])
whatis("Name: ourddp")
whatis("Version: 0.1.0")
whatis("Description: A c10d backend and a DistributedDataParallel reducer for PyTorch")

conflict("ourddp")
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
-- The network between the nodes of this cluster, if they have several:
-- setenv("OURS_INTERFACE", "ib0")
